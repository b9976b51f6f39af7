# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What the core's tables do for compiled callers only, from Python: for tests."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from sarp_cluster.core.posting_tree cimport FIRST_SLOT, Posting
from sarp_cluster.core.routing_directory cimport RoutingDirectory
from sarp_cluster.core.segment cimport SegmentBatch, SegmentColumns
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable
from sarp_cluster.core.removal cimport clear_stale, remove_segment
from sarp_cluster.core.table_replay cimport replay_delta, replay_image, replay_removal


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


def remove(SegmentTable table, uint32_t slot, bint stale=False):
    """Take out a segment that has no children. `stale`: its postings are still there."""
    if not FIRST_SLOT <= slot < table.next_slot:
        raise ValueError(f"slot {slot} was never allocated")
    remove_segment(table, slot, stale)


def end_stale(SegmentTable table, uint32_t slot):
    """No posting of a stale slot is left."""
    clear_stale(table, slot)


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


def row(SegmentTable table, uint32_t slot):
    """The 40 bytes of a row as searches see it, or None if its page is not loaded, which is then noted as missed."""
    if not FIRST_SLOT <= slot < table.next_slot:
        raise ValueError(f"slot {slot} was never allocated")
    cdef SegmentRow* found = table.row(slot)
    return (<const uint8_t*>found)[: sizeof(SegmentRow)] if table.loaded(slot) else None


def replay_images(SegmentTable table, SegmentBatch batch, bint had_delta=False):
    """Replay the segments of a batch as images behind a snapshot. False at the first that makes no sense."""
    cdef int i
    for i in range(batch.count):
        if not replay_image(table, &batch.item[i], had_delta):
            return False
    return True


def replay_deltas(SegmentTable table, SegmentBatch batch, bint had_delta=False):
    """The same as deltas: slot, tag, namespace, delta and count of each count."""
    cdef SegmentColumns* item
    cdef int i
    for i in range(batch.count):
        item = &batch.item[i]
        if not replay_delta(
            table, item.slot, item.tag, item.namespace_id, item.delta, item.count, item.count_before, had_delta
        ):
            return False
    return True


def replay_removals(SegmentTable table, SegmentBatch batch, bint stale=False):
    """Replay that the segments of a batch are gone."""
    cdef int i
    for i in range(batch.count):
        if not replay_removal(table, &batch.item[i], stale):
            return False
    return True
