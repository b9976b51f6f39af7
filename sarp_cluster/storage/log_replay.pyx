# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Replaying a log file: from its bytes to rows of the segment table. The caller knows files, this knows records.

Records carry consecutive LSNs over all files. Replay stops at the first record that does not verify or breaks the order;
whether that is a torn tail or damage is for the caller to say, by the durable LSNs that later groups vouch for.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport SEGMENT_BLOCKS, SegmentColumns, pack_place, place_length
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable
from sarp_cluster.storage.record cimport (
    DELTA_RECORD,
    FRAME_BYTES,
    GROUP_RECORD,
    IMAGE_RECORD,
    DeltaHeader,
    Frame,
    ImageHeader,
    check_frame,
)


cdef bint replay_image(SegmentTable table, const uint8_t* payload, uint32_t length, uint64_t place) except -1:
    """Enter a whole segment. False if the record makes no sense."""
    cdef ImageHeader whole
    cdef SegmentColumns columns
    if length < sizeof(ImageHeader):
        return False
    memcpy(&whole, payload, sizeof(ImageHeader))
    if whole.count == 0 or whole.count > SEGMENT_BLOCKS or whole.fork > whole.count:
        return False
    columns.slot = whole.slot
    columns.tag = whole.tag
    columns.window = whole.window
    columns.namespace_id = whole.namespace_id
    columns.parent = whole.parent
    columns.origin = whole.origin
    columns.fork = whole.fork
    columns.count = whole.count
    columns.image = place
    columns.delta = 0
    return table.restore(&columns)


cdef bint replay_delta(SegmentTable table, const uint8_t* payload, uint32_t length, uint64_t place) except -1:
    """Enter what a segment's image lacks. False if the record makes no sense, or there is no such segment."""
    cdef DeltaHeader more
    cdef SegmentRow* row
    if length < sizeof(DeltaHeader):
        return False
    memcpy(&more, payload, sizeof(DeltaHeader))
    if not FIRST_SLOT <= more.slot < table.next_slot or more.count > SEGMENT_BLOCKS:
        return False
    row = table.row(more.slot)
    if row.count == 0 or row.tag != more.tag or row.namespace_id != more.namespace_id or more.count < more.image_count:
        return False
    row.delta = place
    row.count = more.count
    return True


def replay(
    SegmentTable table, const uint8_t[::1] data, uint32_t file, uint64_t lsn, list others, uint64_t begin=0, bint gaps=False
):
    """Enter the segments of a log file in `table`, append its other records to `others` as (type, payload).

    `begin` is where to begin in the file, `lsn` that of the last record before it. Returns the offset at which replay ended, which is the length of
    the file when all of it made sense, and the LSN of the last record.
    """
    cdef uint64_t offset = begin
    cdef uint64_t length = data.shape[0]
    cdef uint64_t place
    cdef uint32_t size
    cdef Frame frame
    cdef int kind
    while length - offset >= FRAME_BYTES:
        kind = check_frame(&data[offset], <uint32_t>min(length - offset, 0xFFFFFFFFu), file, offset)
        if kind < 0:
            break
        memcpy(&frame, &data[offset], FRAME_BYTES)
        size = (FRAME_BYTES + frame.payload_bytes + 7) & ~<uint32_t>7
        if frame.lsn != lsn + 1 or size > length - offset:
            break
        place = pack_place(file, offset, size)
        if kind == IMAGE_RECORD:
            if not replay_image(table, &data[offset] + FRAME_BYTES, frame.payload_bytes, place):
                break
        elif kind == DELTA_RECORD:
            # With `gaps` the image may have been reclaimed: then the segment was written anew, behind this.
            if not replay_delta(table, &data[offset] + FRAME_BYTES, frame.payload_bytes, place) and not gaps:
                break
        elif kind != GROUP_RECORD:
            others.append((kind, bytes(data[offset + FRAME_BYTES : offset + FRAME_BYTES + frame.payload_bytes])))
        lsn = frame.lsn
        offset += size
    return offset, lsn


def highest_mark(const uint8_t[::1] data, uint64_t begin, uint32_t file):
    """The highest durable LSN that any record behind `begin` that verifies vouches for; 0: none does."""
    cdef uint64_t offset = (begin + 7) & ~<uint64_t>7
    cdef uint64_t length = data.shape[0]
    cdef uint64_t mark
    cdef uint64_t highest = 0
    while length >= FRAME_BYTES + 8 and offset <= length - FRAME_BYTES - 8:
        if check_frame(
            &data[offset], <uint32_t>min(length - offset, 0xFFFFFFFFu), file, offset
        ) == GROUP_RECORD:
            memcpy(&mark, &data[offset + FRAME_BYTES], 8)
            highest = max(highest, mark)
        offset += 8
    return highest


def live_bytes(SegmentTable table):
    """Bytes of all records that a segment points to."""
    cdef uint64_t total = 0
    cdef uint32_t slot
    for slot in range(FIRST_SLOT, table.next_slot):
        if table.row(slot).count:
            total += place_length(table.row(slot).image)
            if table.row(slot).delta:
                total += place_length(table.row(slot).delta)
    return total


def next_record(const uint8_t[::1] data, uint64_t begin, uint32_t file):
    """(offset, LSN) of the first record at or behind `begin` that verifies; (length, 0) if there is none."""
    cdef uint64_t offset = (begin + 7) & ~<uint64_t>7
    cdef uint64_t length = data.shape[0]
    cdef Frame frame
    while length >= FRAME_BYTES and offset <= length - FRAME_BYTES:
        if check_frame(&data[offset], <uint32_t>min(length - offset, 0xFFFFFFFFu), file, offset) >= 0:
            memcpy(&frame, &data[offset], FRAME_BYTES)
            return offset, frame.lsn
        offset += 8
    return length, 0
