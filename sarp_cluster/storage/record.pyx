# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Records of the log: framing, checksums, and the two forms of a segment. docs/formats.md gives every byte.

A frame carries its own address (file number and offset) and a CRC-32C over header and payload, so a record that was torn,
has rotted, or was written or read at the wrong place does not verify. Lengths are checked against the frame before anything
is read through them: the bytes are not trusted.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from sarp_cluster.core.segment cimport (
    DAMAGED,
    DELTA,
    IMAGE,
    READ,
    SEGMENT_BLOCKS,
    LocationRun,
    SegmentBatch,
    SegmentColumns,
    mask_runs,
    place_length,
)
from sarp_cluster.storage.crc32c cimport crc32c

from enum import IntEnum
from typing import NamedTuple

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "the log's formats are little-endian and are read as they stand"
    #endif
    static inline int sarp_ctz64(unsigned long long x) { return __builtin_ctzll(x); }
    static inline int sarp_ones64(unsigned long long x) { return ~x ? __builtin_ctzll(~x) : 64; }
    """
    int sarp_ctz64(unsigned long long x) noexcept nogil
    int sarp_ones64(unsigned long long x) noexcept nogil

cdef enum:
    MAGIC = 0x5253             # "SR"
    VERSION = 1
    IMAGE_HEADER_BYTES = 32
    DELTA_HEADER_BYTES = 24
    RUN_BYTES = 12
    HAS_HANDLE = 0x80          # in a run's tier byte

cdef packed struct RunRecord:
    uint32_t worker
    uint32_t generation
    uint8_t tier
    uint8_t first
    uint8_t count
    uint8_t zero


class RecordType(IntEnum):
    """What a record of the log says."""

    IMAGE = IMAGE_RECORD
    DELTA = DELTA_RECORD
    NAMESPACE = 3
    WORKER = 4
    WORKER_MARK = 5
    FILE_HEADER = 6
    GROUP = GROUP_RECORD
    ROUTING = ROUTING_RECORD
    RECLAIMED = RECLAIMED_RECORD
    REMOVAL = REMOVAL_RECORD
    LOST = LOST_RECORD


class RecordHeader(NamedTuple):
    """A verified frame."""

    type: int
    payload_bytes: int
    lsn: int
    file: int
    offset: int
    incarnation: int


# --- frames --------------------------------------------------------------------------------------------------------------

cdef void seal_frame(
    uint8_t* record, int kind, uint32_t payload_bytes, uint64_t lsn, uint32_t file, uint64_t offset, uint32_t incarnation
) noexcept nogil:
    """Write the header before a payload that is in place, padded with zeros to 8 bytes."""
    cdef Frame frame
    frame.magic = MAGIC
    frame.kind = kind
    frame.version = VERSION
    frame.payload_bytes = payload_bytes
    frame.lsn = lsn
    frame.file = file
    frame.offset_units = <uint32_t>(offset >> 3)
    frame.incarnation = incarnation
    frame.checksum = crc32c(crc32c(0, &frame, FRAME_BYTES - 4), record + FRAME_BYTES, payload_bytes)
    memcpy(record, &frame, FRAME_BYTES)


cdef int check_frame(const uint8_t* record, uint32_t length, uint32_t file, uint64_t offset) noexcept nogil:
    """The record's type if it verifies as the one that stands at this place, else -1. `length` bytes may be read."""
    cdef Frame frame
    if length < FRAME_BYTES:
        return -1
    memcpy(&frame, record, FRAME_BYTES)
    if (
        frame.magic != MAGIC
        or frame.version != VERSION
        or frame.payload_bytes > length - FRAME_BYTES
        or frame.file != file
        or frame.offset_units != <uint32_t>(offset >> 3)
        or frame.checksum != crc32c(crc32c(0, &frame, FRAME_BYTES - 4), record + FRAME_BYTES, frame.payload_bytes)
    ):
        return -1
    return frame.kind


# --- segments: writing ---------------------------------------------------------------------------------------------------

cdef inline uint32_t padded(uint32_t size) noexcept nogil:
    """Records begin and end at multiples of 8 bytes."""
    return (size + 7) & ~<uint32_t>7


cdef uint32_t segment_bytes(const SegmentColumns* segment, const LocationRun* runs) noexcept nogil:
    """Bytes of the record that `segment.write` asks for, frame and padding included."""
    cdef uint32_t r, count = 0, handles = 0, size
    for r in range(segment.runs_count):
        count += mask_runs(runs[r].mask)
        if runs[r].has_handle:
            handles += mask_runs(runs[r].mask)
    if segment.write == DELTA:
        size = DELTA_HEADER_BYTES + 8 * (segment.count - segment.image_count)
    else:
        size = IMAGE_HEADER_BYTES + 8 * segment.count
    return FRAME_BYTES + padded(size + 8 * handles + RUN_BYTES * count)


cdef void write_segment(uint8_t* record, const SegmentColumns* segment, const LocationRun* runs) noexcept nogil:
    """Write the payload behind the frame; the frame is sealed afterwards."""
    cdef ImageHeader image
    cdef DeltaHeader delta
    cdef RunRecord written
    cdef uint8_t* at
    cdef uint8_t* handle_at
    cdef uint64_t mask
    cdef uint32_t r, count = 0, handles = 0
    cdef int first, length, kept
    for r in range(segment.runs_count):
        count += mask_runs(runs[r].mask)
        if runs[r].has_handle:
            handles += mask_runs(runs[r].mask)
    at = record + FRAME_BYTES
    if segment.write == DELTA:
        delta = DeltaHeader(
            segment.slot, segment.tag, segment.window, segment.namespace_id, segment.image_count, segment.count,
            count, handles, segment.count_before, segment.delta != 0, 0,
        )
        memcpy(at, &delta, DELTA_HEADER_BYTES)
        at += DELTA_HEADER_BYTES
        kept = segment.image_count
    else:
        image = ImageHeader(
            segment.slot, segment.tag, segment.window, segment.namespace_id, segment.parent, segment.origin,
            segment.parent_tag, segment.origin_tag, segment.fork, segment.count, count, handles,
            segment.count_before, segment.delta != 0,
        )
        memcpy(at, &image, IMAGE_HEADER_BYTES)
        at += IMAGE_HEADER_BYTES
        kept = 0
    memcpy(at, &segment.ids[kept], 8 * (segment.count - kept))
    handle_at = at + 8 * (segment.count - kept)
    at = handle_at + 8 * handles
    for r in range(segment.runs_count):
        mask = runs[r].mask
        while mask:
            first = sarp_ctz64(mask)
            length = sarp_ones64(mask >> first)
            mask &= ~((~<uint64_t>0 >> (64 - length)) << first)
            written = RunRecord(
                runs[r].worker, runs[r].generation, runs[r].tier | (HAS_HANDLE if runs[r].has_handle else 0), first, length,
                0,
            )
            memcpy(at, &written, RUN_BYTES)
            at += RUN_BYTES
            if runs[r].has_handle:
                memcpy(handle_at, &runs[r].handle, 8)
                handle_at += 8
    if RUN_BYTES * count & 7:
        memset(at, 0, 8 - (RUN_BYTES * count & 7))


# --- segments: reading ---------------------------------------------------------------------------------------------------

cdef int read_runs(
    SegmentBatch batch, int item, const uint8_t* handle_at, uint32_t handles, uint32_t count
) except -1:
    """Read the runs column that follows `handles` handles. 0 if it makes no sense."""
    cdef SegmentColumns* segment = &batch.item[item]
    cdef const uint8_t* at = handle_at + 8 * handles
    cdef RunRecord written
    cdef LocationRun run
    cdef LocationRun* last = NULL
    cdef uint32_t r
    cdef uint64_t handle
    batch.reserve_runs(count)
    segment = &batch.item[item]
    segment.runs_begin = batch.run_count
    segment.runs_count = 0
    for r in range(count):
        memcpy(&written, at, RUN_BYTES)
        at += RUN_BYTES
        handle = 0
        if written.tier & HAS_HANDLE:
            if handles == 0:
                return 0
            memcpy(&handle, handle_at, 8)
            handle_at += 8
            handles -= 1
        if written.count == 0 or written.first + written.count > segment.count or (written.tier & 0x7F) > 3:
            return 0
        run.mask = (~<uint64_t>0 >> (64 - written.count)) << written.first
        run.handle = handle
        run.worker = written.worker
        run.generation = written.generation
        run.tier = written.tier & 0x7F
        run.has_handle = written.tier & HAS_HANDLE != 0
        if (last != NULL and last.worker == run.worker and last.tier == run.tier and last.generation == run.generation
                and last.has_handle == run.has_handle and last.handle == run.handle):
            last.mask |= run.mask
        else:
            last = &batch.run[batch.run_count]
            last[0] = run
            batch.run_count += 1
            segment.runs_count += 1
    return handles == 0


cdef int read_segment(SegmentBatch batch, int item, const uint8_t* image, const uint8_t* delta) except -1:
    """Fill an item from its image and, where it has one, its delta: frames that were checked. DAMAGED if they disagree
    with the segment table or with each other."""
    cdef SegmentColumns* segment = &batch.item[item]
    cdef ImageHeader whole
    cdef DeltaHeader more
    cdef Frame frame
    cdef uint32_t length
    segment.state = DAMAGED
    memcpy(&frame, image, FRAME_BYTES)
    length = frame.payload_bytes
    if frame.kind != IMAGE_RECORD or length < IMAGE_HEADER_BYTES:
        return 0
    memcpy(&whole, image + FRAME_BYTES, IMAGE_HEADER_BYTES)
    if (
        whole.count > SEGMENT_BLOCKS
        or length != padded(IMAGE_HEADER_BYTES + 8 * whole.count + 8 * whole.handles + RUN_BYTES * whole.runs)
        or whole.slot != segment.slot
        or whole.tag != segment.tag
        or whole.window != segment.window
        or whole.namespace_id != segment.namespace_id
        or whole.parent != segment.parent
        or whole.origin != segment.origin
        or whole.fork != segment.fork
    ):
        return 0
    memcpy(segment.ids, image + FRAME_BYTES + IMAGE_HEADER_BYTES, 8 * whole.count)
    segment.image_count = whole.count
    if delta == NULL:
        if whole.count != segment.count:
            return 0
        if read_runs(batch, item, image + FRAME_BYTES + IMAGE_HEADER_BYTES + 8 * whole.count, whole.handles, whole.runs):
            batch.item[item].state = READ
        return 0
    memcpy(&frame, delta, FRAME_BYTES)
    length = frame.payload_bytes
    if frame.kind != DELTA_RECORD or length < DELTA_HEADER_BYTES:
        return 0
    memcpy(&more, delta + FRAME_BYTES, DELTA_HEADER_BYTES)
    if (
        more.count > SEGMENT_BLOCKS
        or more.count != segment.count
        or more.image_count != whole.count
        or more.image_count > more.count
        or length
        != padded(DELTA_HEADER_BYTES + 8 * (more.count - more.image_count) + 8 * more.handles + RUN_BYTES * more.runs)
        or more.slot != segment.slot
        or more.tag != segment.tag
        or more.window != segment.window
        or more.namespace_id != segment.namespace_id
    ):
        return 0
    memcpy(&segment.ids[whole.count], delta + FRAME_BYTES + DELTA_HEADER_BYTES, 8 * (more.count - more.image_count))
    if read_runs(
        batch, item, delta + FRAME_BYTES + DELTA_HEADER_BYTES + 8 * (more.count - more.image_count), more.handles, more.runs
    ):
        batch.item[item].state = READ
    return 0


# --- other records, for the shell ----------------------------------------------------------------------------------------

def frame_record(int kind, bytes payload, uint64_t lsn, uint32_t file, uint64_t offset, uint32_t incarnation):
    """A whole record of any type, padded to 8 bytes."""
    cdef uint32_t size = (FRAME_BYTES + len(payload) + 7) & ~7
    record = bytearray(size)
    record[FRAME_BYTES : FRAME_BYTES + len(payload)] = payload
    cdef uint8_t[::1] view = record
    seal_frame(&view[0], kind, len(payload), lsn, file, offset, incarnation)
    return bytes(record)


def pack_removal(row):
    """Payload of the REMOVAL record of a segment that cannot be read, given its row (SegmentTable.describe)."""
    cdef RemovalHeader gone = RemovalHeader(
        row["slot"], row["tag"], row["fork"], row["count"], row["parent"], row["origin"], row["delta"] != 0, 1, 0, 0
    )
    return (<const uint8_t*>&gone)[: sizeof(RemovalHeader)]


def pack_removal_again(uint32_t slot):
    """Payload of a REMOVAL record that says again that a slot is free."""
    cdef RemovalHeader gone = RemovalHeader(slot, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return (<const uint8_t*>&gone)[: sizeof(RemovalHeader)]


def read_frame(const uint8_t[::1] data, Py_ssize_t at, uint32_t file, uint64_t offset):
    """The verified header of the record at data[at:], which stands at `offset` of log file `file`; None if it fails."""
    cdef Frame frame
    cdef Py_ssize_t left = data.shape[0] - at
    if at < 0 or offset & 7 or left < FRAME_BYTES:
        return None
    if check_frame(&data[at], <uint32_t>min(left, 0xFFFFFFFFu), file, offset) < 0:
        return None
    memcpy(&frame, &data[at], FRAME_BYTES)
    return RecordHeader(frame.kind, frame.payload_bytes, frame.lsn, frame.file, offset, frame.incarnation)
