# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What the core's tables do for compiled callers only, from Python: for tests."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from sarp_cluster.core.posting_tree cimport FIRST_SLOT, Posting
from sarp_cluster.core.routing_directory cimport RoutingDirectory
from sarp_cluster.core.segment cimport SegmentBatch
from sarp_cluster.core.segment_table cimport SegmentTable


def set_state(RoutingDirectory directory, uint64_t key, int point, int state):
    """Set the state of the points behind a point of an entry."""
    if not (0 <= state < 64 and 0 <= point < 64):
        raise ValueError(f"{state} is no state of a point {point}")
    directory.set_state(key, point, state)


def probe(RoutingDirectory directory, uint64_t key, int point):
    """(is there a live posting under the key, state of the points behind the point)."""
    cdef int state
    found = directory.probe(key, point, &state)
    return bool(found), state


def slots_after(RoutingDirectory directory, uint64_t key, uint64_t high, uint64_t low, uint32_t slot, size_t limit):
    """Up to `limit` live postings of a list behind one of them, as (high, low, slot); slot 0: from its beginning."""
    cdef Posting after = Posting(key, high, low, slot)
    cdef Posting* out = <Posting*>malloc(max(limit, <size_t>1) * sizeof(Posting))
    cdef size_t i
    if out == NULL:
        raise MemoryError("postings")
    try:
        return [(out[i].high, out[i].low, out[i].slot) for i in range(directory.slots_after(&after, out, limit))]
    finally:
        free(out)


def allocate(SegmentTable table):
    """(slot, tag) of a free slot."""
    slot = table.allocate()
    return slot, table.row(slot).tag


def release(SegmentTable table, uint32_t slot):
    """Give back a slot that was allocated and not stored."""
    if not FIRST_SLOT <= slot < table.next_slot:
        raise ValueError(f"slot {slot} was never allocated")
    table.release(slot)


def store(SegmentTable table, SegmentBatch batch):
    """Enter the segments of a batch."""
    cdef int i
    for i in range(batch.count):
        if not FIRST_SLOT <= batch.item[i].slot < table.next_slot:
            raise ValueError(f"slot {batch.item[i].slot} was never allocated")
        table.store(&batch.item[i])


def remove(SegmentTable table, uint32_t slot):
    """Take out a segment that has no children."""
    if not FIRST_SLOT <= slot < table.next_slot:
        raise ValueError(f"slot {slot} was never allocated")
    table.remove(slot)


def load(SegmentTable table, slots):
    """A batch of what the table knows of these segments."""
    cdef SegmentBatch batch = SegmentBatch()
    cdef int item
    for slot in slots:
        if not FIRST_SLOT <= slot < table.next_slot:
            raise ValueError(f"slot {slot} was never allocated")
        item = batch.append()
        table.load(slot, &batch.item[item])
    return batch
