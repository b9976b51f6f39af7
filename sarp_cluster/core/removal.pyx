# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Taking segments out of the table, those too of which nobody knows any more where they are registered.

A segment that cannot be read does not say its block IDs, so its postings are not known. They stay in the directory for a
while: the row is free (or has fewer blocks, where a segment was cut short) and marked as *stale*, and its slot is given to
nobody else. Whoever is led to a free row skips it; a posting of a segment that was cut costs a read at most. A round over all
postings (StalePostings) then discards those that are not true, as changes of the directory that the log carries like all
others, and ends the marks. A mark is part of the row: a snapshot has it, replay sets it again, and a round is begun anew.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from sarp_cluster.core.candidate_filter cimport make_filter
from sarp_cluster.core.directory_levels cimport LEVELS_MAX
from sarp_cluster.core.posting_run cimport level_seek
from sarp_cluster.core.posting_tree cimport FIRST_SLOT, REMOVED, Cursor, Posting
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.run_merge cimport merged_next
from sarp_cluster.core.segment cimport IMAGE, READ, SegmentBatch, SegmentColumns
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable

from typing import NamedTuple

from sarp_cluster.errors import InvariantViolationError

cdef enum:
    FOUND_MAX = 256            # postings of stale slots that a step may find


cdef int remove_segment(SegmentTable table, uint32_t slot, bint stale) except -1:
    """Take out a segment that nothing depends on. `stale`: its postings are still there."""
    cdef SegmentRow* row
    cdef uint32_t other
    table.check_loaded(slot)
    row = table.row(slot)
    if row.count == 0 or row.children:
        raise InvariantViolationError(f"segment {slot} is free or has {row.children} children")
    table.check_loaded(row.parent)
    table.check_loaded(row.origin)
    table.touch(slot)
    table.segments -= 1
    table.blocks -= row.count - row.fork
    table.block_entries -= row.count
    table.deltas -= row.delta != 0
    table.version += 1
    for other in (row.parent, row.origin):
        if other:
            table.touch(other)
            table.row(other).children -= 1
    row.count = 0
    if stale or row.stale:
        table.mark_stale(slot)
    else:
        table.release(slot)
    return 0


cdef int clear_stale(SegmentTable table, uint32_t slot) except -1:
    """The directory has no posting of the slot that is not true."""
    table.touch(slot)
    table.row(slot).stale = 0
    table.stale.pop(slot)
    if table.row(slot).count == 0:
        table.release(slot)
    return 0


def drop(SegmentTable table, uint32_t slot):
    """Take out a segment that cannot be read and that nothing depends on. Rows of parent and origin must be loaded."""
    remove_segment(table, slot, True)


class Dependents(NamedTuple):
    """What depends on a segment, as far as rows were looked through."""

    children: int
    """Segments whose parent it is."""
    copies: int
    """Segments whose origin it is."""
    fork: int
    """How many of its blocks copies have at most."""
    copy: int
    """The slot of one that has so many; 0: there is none."""


def dependents(SegmentTable table, uint32_t slot, uint32_t begin, uint32_t rows, known):
    """What in the next `rows` rows from `begin` on depends on a segment, added to what is `known`, and where to go on; 0:
    those were all."""
    cdef uint32_t other = max(begin, <uint32_t>FIRST_SLOT)
    cdef uint32_t end = min(<uint64_t>other + rows, <uint64_t>table.next_slot)
    cdef uint32_t copy
    cdef size_t children, copies
    cdef int fork
    cdef SegmentRow* row
    children, copies, fork, copy = known
    while other < end:
        row = table.row(other)
        if row.count:
            children += row.parent == slot
            if row.origin == slot:
                copies += 1
                if row.fork > fork:
                    fork = row.fork
                    copy = other
        other += 1
    return Dependents(children, copies, fork, copy), end if end < table.next_slot else 0


def plan_cut(SegmentTable table, SegmentBatch writes, uint32_t slot, SegmentBatch batch, int count):
    """Fill `writes` with a segment as it is known from the one copy in `batch`: its first blocks, held by nobody."""
    cdef SegmentColumns* segment
    cdef int item
    if batch.item[0].state != READ or not table.row(slot).fork < count <= min(batch.item[0].fork, table.row(slot).count):
        raise InvariantViolationError(f"segment {slot} cannot be cut to {count} blocks")
    writes.clear()
    item = writes.append()
    segment = &writes.item[item]
    table.load(slot, segment)
    segment.count = count
    segment.state = READ
    segment.write = IMAGE
    memcpy(segment.ids, batch.item[0].ids, count * sizeof(uint64_t))


def commit_cut(SegmentTable table, RoutingPoints points, SegmentBatch writes):
    """Enter a segment that was cut and now stands in the store. Postings of what it was before stay for a while."""
    table.store(&writes.item[0])
    points.register(writes.item[0].slot, writes.item[0].ids, writes.item[0].count, 0)
    if points.directory.missing.count or table.missed_count:
        raise InvariantViolationError("a change was entered that wanted what is not in memory")


cdef class StalePostings:
    """One round over the directory's postings, in steps. All of table and directory must be in memory.

    A step: `next_postings`, `to_read`, read those, `discard`. In between anything may change. At the end `finish`.
    """

    def __init__(self, RoutingPoints points, SegmentTable table):
        self.points = points
        self.table = table
        self.marks = table.stale_marks
        self.after = Posting(0, 0, 0, 0)
        self.kept = {}
        self.found = <Posting*>malloc(FOUND_MAX * sizeof(Posting))
        if self.found == NULL:
            raise MemoryError("stale postings")

    def __dealloc__(self):
        free(self.found)

    def next_postings(self, size_t limit):
        """Look at up to `limit` postings. False at the end."""
        cdef Cursor cursor[LEVELS_MAX]
        cdef Posting posting
        cdef uint32_t slot
        cdef int i
        cdef bint more = True
        self.found_count = 0
        for i in range(self.points.directory.levels):
            cursor[i] = level_seek(
                &self.points.directory.level[i], self.after.key, self.after.high, self.after.low, self.after.slot + 1
            )
        while limit > 0 and self.found_count < FOUND_MAX:
            more = merged_next(cursor, self.points.directory.levels, &posting)
            if not more:
                break
            limit -= 1
            slot = posting.slot & ~<uint32_t>REMOVED
            self.after = posting
            self.after.slot = slot
            if posting.slot & REMOVED or not FIRST_SLOT <= slot < self.table.next_slot:
                continue
            if self.table.row(slot).stale:
                self.found[self.found_count] = posting
                self.found_count += 1
        return more

    def to_read(self):
        """Slots of the segments that have to be read to judge what was found."""
        cdef int i
        return list({
            self.found[i].slot: None for i in range(self.found_count) if self.table.row(self.found[i].slot).count
        })

    def discard(self, SegmentBatch batch):
        """Discard what was found and is not true, given the segments that were asked for."""
        cdef SegmentColumns* segment
        cdef SegmentRow* row
        cdef Posting* posting
        cdef dict item_of = {}
        cdef int i
        for i in range(batch.count):
            item_of[batch.item[i].slot] = i
        for i in range(self.found_count):
            posting = &self.found[i]
            row = self.table.row(posting.slot)
            if row.count:
                if not row.stale:
                    continue
                segment = &batch.item[<int>item_of[posting.slot]] if posting.slot in item_of else NULL
                if (segment == NULL or segment.state != READ or segment.tag != row.tag or segment.image != row.image
                        or segment.delta != row.delta):
                    self.kept[posting.slot] = None
                    continue
                if self.is_true(posting, segment):
                    continue
            self.discarded += self.points.directory.discard(posting)
        self.found_count = 0

    cdef bint is_true(self, const Posting* posting, const SegmentColumns* segment) noexcept:
        """Is this how the segment is registered at one of its points?

        If it is, it was before it was cut, too: the blocks that count are the same, and what was registered behind a point
        stays so.
        """
        cdef uint64_t high, low
        cdef int point
        cdef int step = max(self.points.parameters.interval // 2, 1)
        for point in range(segment.count):
            if point % step and point != self.points.parameters.segment_blocks - 1:
                continue
            if segment.ids[point] & self.points.parameters.key_mask == posting.key and self.points.registered(
                segment.ids, point
            ):
                make_filter(&self.points.parameters, segment.ids, segment.count, point, &high, &low)
                if high == posting.high and low == posting.low:
                    return True
        return False

    def finish(self):
        """All postings were looked at: end the marks that were there when the round began. Returns how many of these are
        left, since their segments could not be read."""
        for slot, number in list(self.table.stale.items()):
            if number <= self.marks and slot not in self.kept:
                clear_stale(self.table, slot)
        return len(self.kept)
