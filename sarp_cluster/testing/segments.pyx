# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Segments and their records from Python: what tests need to write and read single records."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from sarp_cluster.core cimport segment as core
from sarp_cluster.core.segment cimport DAMAGED, READ, SEGMENT_BLOCKS, TO_READ, LocationRun, SegmentBatch, SegmentColumns
from sarp_cluster.storage.record cimport (
    FRAME_BYTES,
    check_frame,
    read_segment,
    seal_frame,
    segment_bytes,
    write_segment,
)


def make_batch(segments):
    """A batch of segments that are known whole, ready to be written."""
    cdef SegmentBatch batch = SegmentBatch()
    cdef int item
    for fields in segments:
        item = fill_row(batch, fields)
        batch.item[item].image_count = fields.get("image_count", 0)
        batch.item[item].state = READ
        batch.item[item].write = fields.get("write", core.IMAGE)
        for i, block in enumerate(fields["ids"]):
            batch.item[item].ids[i] = block
        for run in fields.get("runs", ()):
            batch.reserve_runs(1)
            batch.run[batch.run_count] = LocationRun(
                run["mask"], run["handle"] or 0, run["worker"], run["generation"], run["tier"], run["handle"] is not None
            )
            batch.run_count += 1
            batch.item[item].runs_count += 1
    return batch


def make_unread_batch(segments):
    """A batch of the same segments as the segment table knows them: their records are still to be read."""
    cdef SegmentBatch batch = SegmentBatch()
    for fields in segments:
        fill_row(batch, fields)
    return batch


cdef int fill_row(SegmentBatch batch, fields) except -1:
    if not 1 <= len(fields["ids"]) <= SEGMENT_BLOCKS:
        raise ValueError(f"a segment of {len(fields['ids'])} blocks")
    cdef int item = batch.append()
    cdef SegmentColumns* columns = &batch.item[item]
    columns.slot = fields["slot"]
    columns.tag = fields.get("tag", 0)
    columns.window = fields.get("window", 0)
    columns.image = fields.get("image", 0)
    columns.delta = fields.get("delta", 0)
    columns.namespace_id = fields.get("namespace", 1)
    columns.parent = fields.get("parent", 0)
    columns.origin = fields.get("origin", 0)
    columns.parent_tag = fields.get("parent_tag", 0)
    columns.origin_tag = fields.get("origin_tag", 0)
    columns.fork = fields.get("fork", 0)
    columns.count = len(fields["ids"])
    columns.count_before = fields.get("count_before", 0)
    columns.image_count = 0
    columns.state = TO_READ
    columns.write = 0
    columns.origin_item = -1
    columns.matched = 0
    columns.runs_begin = batch.run_count
    columns.runs_count = 0
    return item


def encode_segment(SegmentBatch batch, int item, uint64_t lsn, uint32_t file, uint64_t offset, uint32_t incarnation):
    """The record that an item's `write` asks for, as it would stand at this place."""
    cdef SegmentColumns* segment = &batch.item[item]
    cdef LocationRun* runs = &batch.run[segment.runs_begin]
    cdef uint32_t size = segment_bytes(segment, runs)
    record = bytearray(size)
    cdef uint8_t[::1] view = record
    write_segment(&view[0], segment, runs)
    seal_frame(&view[0], segment.write, size - FRAME_BYTES, lsn, file, offset, incarnation)
    return bytes(record)


cdef class ExactCopy:
    """A copy of a record in a block of exactly its size, so that a memory checker sees a read past its end."""
    cdef uint8_t* data
    cdef uint32_t length

    def __init__(self, bytes record):
        self.length = len(record)
        self.data = <uint8_t*>malloc(self.length)
        if self.data == NULL:
            raise MemoryError("record")
        memcpy(self.data, <const char*>record, self.length)

    def __dealloc__(self):
        free(self.data)


def decode_segment(SegmentBatch batch, int item, image, delta=None):
    """Fill an item from records given as (bytes, file, offset), checked as the log checks them. Returns its state."""
    cdef ExactCopy copy
    cdef const uint8_t* found[2]
    found[0] = NULL
    found[1] = NULL
    copies = []
    for i, record in enumerate([image] if delta is None else [image, delta]):
        data, file, offset = record
        copy = ExactCopy(data)
        copies.append(copy)
        if check_frame(copy.data, copy.length, file, offset) < 0:
            batch.item[item].state = DAMAGED
            return DAMAGED
        found[<int>i] = copy.data
    read_segment(batch, item, found[0], found[1])
    return batch.item[item].state


def pack_place(uint32_t file, uint64_t offset, uint32_t length):
    """A place in the log as one integer."""
    return core.pack_place(file, offset, length)


def unpack_place(uint64_t place):
    """(file, offset, length) of a place."""
    return core.place_file(place), core.place_offset(place), core.place_length(place)
