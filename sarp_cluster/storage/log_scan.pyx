# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Looking through a log file that is to be reclaimed: which segments have records in it, and what else it says.

A record is taken only if it verifies. Where one does not, the next that does is looked for, as a reader of that segment
would find nothing there either; that it happened is told.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport DAMAGED, SegmentBatch, pack_place, place_file
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable
from sarp_cluster.storage.record cimport (
    DELTA_RECORD,
    FILE_HEADER_RECORD,
    FRAME_BYTES,
    GROUP_RECORD,
    IMAGE_RECORD,
    LOST_RECORD,
    ROUTING_RECORD,
    Frame,
    check_frame,
)

from typing import NamedTuple

cdef uint64_t RECORD_MAX = 0xFFFF * 8


class FileScan(NamedTuple):
    """What a stretch of a log file says."""

    segments: bytes
    others: list
    end: int
    damaged: bool


cdef struct Found:
    uint64_t place
    uint32_t number            # slot of a segment; of another record: the number its payload begins with
    uint32_t kind


def scan(const uint8_t[::1] data, uint32_t file, uint64_t begin, bint last):
    """The records in `data`, which stands at offset `begin` of a log file; `last`: the file ends with it.

    A record that `data` ends within is left for the next call, which begins where this one ended. `data` has room for any.
    """
    cdef uint64_t length = data.shape[0]
    cdef uint64_t offset = 0
    cdef uint64_t size
    cdef Frame frame
    cdef Found* found = NULL
    cdef Found* others = NULL
    cdef void* memory
    cdef size_t count = 0, capacity = 0, other_count = 0, other_capacity = 0
    cdef bint damaged = False, verified
    cdef size_t i
    try:
        with nogil:
            while length - offset >= FRAME_BYTES:
                memcpy(&frame, &data[offset], FRAME_BYTES)
                size = (FRAME_BYTES + <uint64_t>frame.payload_bytes + 7) & ~<uint64_t>7
                if size > length - offset and size <= RECORD_MAX and offset and not last:
                    break  # at the beginning of `data` it is no record: those fit
                verified = (
                    size <= length - offset
                    and check_frame(&data[offset], <uint32_t>min(size, 0xFFFFFFFFu), file, begin + offset) >= 0
                )
                if not verified:
                    damaged = True
                    offset += 8
                    continue
                if frame.kind == IMAGE_RECORD or frame.kind == DELTA_RECORD:
                    if count == capacity:
                        capacity = max(1_024, 2 * capacity)
                        memory = realloc(found, capacity * sizeof(Found))
                        if memory == NULL:
                            with gil:
                                raise MemoryError("scan")
                        found = <Found*>memory
                    memcpy(&found[count].number, &data[offset + FRAME_BYTES], 4)
                    found[count].place = pack_place(file, begin + offset, <uint32_t>size)
                    found[count].kind = frame.kind
                    count += 1
                elif frame.kind != GROUP_RECORD and frame.kind != ROUTING_RECORD and frame.kind != FILE_HEADER_RECORD:
                    if other_count == other_capacity:
                        other_capacity = max(64, 2 * other_capacity)
                        memory = realloc(others, other_capacity * sizeof(Found))
                        if memory == NULL:
                            with gil:
                                raise MemoryError("scan")
                        others = <Found*>memory
                    others[other_count].number = 0
                    if frame.payload_bytes >= 4:
                        memcpy(&others[other_count].number, &data[offset + FRAME_BYTES], 4)
                    others[other_count].place = others[other_count].number
                    if frame.kind == LOST_RECORD and frame.payload_bytes >= 8:
                        memcpy(&others[other_count].place, &data[offset + FRAME_BYTES], 8)
                    others[other_count].kind = frame.kind
                    other_count += 1
                offset += size
        if last and offset < length:
            damaged = True
            offset = length
        return FileScan(
            segments=(<const char*>found)[:count * sizeof(Found)] if count else b"",
            others=list({(others[i].kind, others[i].place): None for i in range(other_count)}),
            end=begin + offset,
            damaged=damaged,
        )
    finally:
        free(found)
        free(others)


def live_slots(SegmentTable table, bytes segments):
    """The segments, each once, that still point to one of the records that a scan found."""
    cdef const Found* found = <const Found*><const char*>segments
    cdef SegmentRow* row
    cdef size_t i
    slots = {}
    for i in range(len(segments) // sizeof(Found)):
        if FIRST_SLOT <= found[i].number < table.next_slot:
            row = table.row(found[i].number)
            if row.count and (row.image == found[i].place or row.delta == found[i].place):
                slots[found[i].number] = None
    return list(slots)


def still_in(SegmentTable table, list slots, uint32_t file):
    """Of these segments, those with a record in this file."""
    cdef SegmentRow* row
    cdef uint32_t slot
    left = []
    for slot in slots:
        row = table.row(slot)
        if row.count and (place_file(row.image) == file or (row.delta and place_file(row.delta) == file)):
            left.append(slot)
    return left


def slots_in(SegmentTable table, uint32_t file, uint32_t begin, uint32_t rows):
    """The segments among `rows` rows from `begin` on with a record in this file, and where to go on; 0: those were all."""
    cdef uint32_t first = max(begin, <uint32_t>FIRST_SLOT)
    cdef uint32_t end = min(<uint64_t>first + rows, <uint64_t>table.next_slot)
    return still_in(table, list(range(first, end)), file), end if end < table.next_slot else 0


def free_slots(SegmentTable table):
    """The slots that were used and are free. All of the table must be loaded."""
    cdef uint32_t slot
    return [slot for slot in range(FIRST_SLOT, table.next_slot) if table.row(slot).count == 0]


def unreadable(SegmentBatch batch):
    """The slots of the segments in a batch that are damaged."""
    return [batch.item[i].slot for i in range(batch.count) if batch.item[i].state == DAMAGED]
