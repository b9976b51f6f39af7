# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Refinement and rematerialisation: building the entries behind a list that grew (paper §4.2, §4.4).

A back-fill walks a posting list in bounded steps. Each step names segments whose block IDs are to be read, outside the core;
then it registers them at the point behind. Nobody looks there until `publish`, which is one store, so a query sees either
the old entry or the complete new ones.

Why nothing is missed although the list changes between steps: from BUILDING on, whatever is newly registered or extended in
the list registers behind it by itself (routing_points), and an unchanged reference keeps its place in the sorted list, so
the walk meets it. Meeting a reference twice is harmless: registering is idempotent. So a step that is cancelled while it
reads is simply done again: the walk moves on once its segments are registered.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc

from sarp_cluster.core.posting_tree cimport Posting
from sarp_cluster.core.routing_directory cimport BUILDING, PUBLISHED
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.segment cimport READ, SegmentBatch, SegmentColumns
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable

from sarp_cluster.limits import BACKFILL_SEGMENTS_A_STEP

cdef int STEP_MAX = BACKFILL_SEGMENTS_A_STEP


cdef class Backfill:
    """Builds the entries at the points of one kind behind one entry, and publishes them at once."""

    def __init__(self, RoutingPoints points, uint64_t key, int point, int kind):
        self.points = points
        self.key = key
        self.point = point
        self.kind = kind
        self.after = Posting(key, 0, 0, 0)
        self.reached = self.after

    def __dealloc__(self):
        free(self.listed)

    def next_segments(self, SegmentTable table, SegmentBatch batch, int limit):
        """Put into `batch` the next segments to be read, at most `limit`. False when the list is at its end.

        Void where rows or entries were wanted that are not in memory: have them loaded and ask again.
        """
        cdef int target = self.points.successor(self.point, self.kind)
        cdef size_t found, i
        cdef int item
        batch.clear()
        limit = min(limit, STEP_MAX)
        if self.listed == NULL:
            self.listed = <Posting*>malloc(STEP_MAX * sizeof(Posting))
            if self.listed == NULL:
                raise MemoryError("back-fill")
        found = self.points.directory.slots_after(&self.after, self.listed, limit)
        if found == 0:
            return False
        self.reached = self.listed[found - 1]
        for i in range(found):
            if table.row(self.listed[i].slot).count > target:
                item = batch.append()
                table.load(self.listed[i].slot, &batch.item[item])
        return True

    def in_memory(self, SegmentBatch batch):
        """Will `register_batch` or `publish` find all it looks at? Otherwise have what was missed loaded and ask again."""
        cdef int i
        if self.points.directory.unloaded:
            self.points.directory.state(self.key, self.point)
            for i in range(batch.count):
                if batch.item[i].state == READ:
                    self.points.touch(batch.item[i].slot, batch.item[i].ids, batch.item[i].count, 0)
        return not self.points.directory.missing.count

    def register_batch(self, SegmentTable table, SegmentBatch batch):
        """Register the segments that were read at the point behind. Returns how many could not be read.

        A segment that was extended meanwhile registered itself; one that is gone has a new tag. A damaged segment is
        left out: before it is repaired the entries must not be published, or what hides it would be stored again.
        """
        cdef int target = self.points.successor(self.point, self.kind)
        cdef SegmentColumns* item
        cdef SegmentRow* row
        cdef int i
        damaged = 0
        for i in range(batch.count):
            item = &batch.item[i]
            row = table.row(item.slot)
            if row.tag != item.tag or row.count != item.count:
                continue
            if item.state != READ:
                damaged += 1
            elif item.ids[self.point] & self.points.parameters.key_mask == self.key and self.points.registered(
                item.ids, self.point
            ):  # otherwise it stands in the list for another point's sake, whose key collides
                self.points.register_at(item.slot, item.ids, item.count, target)
        self.after = self.reached
        return damaged

    def publish(self):
        """Let queries look behind the entry: one store."""
        cdef int state = self.points.directory.state(self.key, self.point)
        state ^= (BUILDING ^ PUBLISHED) << self.kind
        self.points.directory.set_state(self.key, self.point, state)
        self.published = True
