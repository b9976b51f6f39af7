# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Healing: the search of an insert fills in a damaged ancestor, and the insert writes it under its old slot (design §4).

That is safe where the segment's block IDs are known without it: it is full, and parent references lead to it from a segment
that verifies, since a block ID stands for all before it. The locations it had are lost: a miss.

A block has one home. So a segment is not healed where another one that can be read has blocks of its own by now, which an
insert made that could not know what the damaged one held.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from sarp_cluster.core.block_id cimport NamespaceKey
from sarp_cluster.core.matching cimport Search
from sarp_cluster.core.segment cimport DAMAGED, READ, SegmentColumns


cdef class HealingSearch(Search):
    """The search of an insert: it fills in damaged ancestors."""

    def __dealloc__(self):
        free(self.hole)

    cpdef load(self, bytes wire, NamespaceKey key, uint32_t namespace_id, int base_window):
        """As Search.load."""
        cdef void* memory
        Search.load(self, wire, key, namespace_id, base_window)
        if self.windows > self.hole_capacity:
            memory = realloc(self.hole, self.windows * sizeof(int))
            if memory == NULL:
                raise MemoryError("search")
            self.hole = <int*>memory
            self.hole_capacity = self.windows

    cdef int reset(self, int homes_from) except -1:
        cdef int window
        for window in range(self.windows):
            self.hole[window] = -1
        return Search.reset(self, homes_from)

    cdef void note_holes(self, int window) noexcept nogil:
        """From `window` on up to the best candidate: which damaged ancestors must hold what the query has there?"""
        cdef int above, item
        # From the best candidate, which verified, downwards: the parent of a segment of this sequence is of it too.
        for above in range(self.top - 1, window - 1, -1):
            item = self.path[above]
            if item < 0:
                return
            if self.batch.item[item].state == DAMAGED:
                if (self.batch.item[item].count == self.parameters.segment_blocks
                        and self.batch.item[item].window == self.base_window + above
                        and self.batch.item[item].namespace_id == self.namespace_id):
                    self.hole[above] = item
            elif self.verify(item, above) < self.parameters.segment_blocks:
                return

    cdef void heal(self) noexcept nogil:
        """Fill in the hole in window `top`. It has no image (`image_count` is 0) until it is written."""
        cdef int item = self.hole[self.top]
        cdef int size = self.parameters.segment_blocks
        cdef int best = self.batch.item[self.best_item].matched if self.best_item >= 0 else 0
        cdef SegmentColumns* segment
        if item < 0:
            return
        self.hole[self.top] = -1
        segment = &self.batch.item[item]
        if best > segment.fork or not self.whole(item, self.top, size):
            return
        memcpy(segment.ids, self.ids + <Py_ssize_t>self.top * size, size * sizeof(uint64_t))
        segment.state = READ
        segment.image_count = 0
        segment.runs_count = 0
        segment.matched = size
        self.best_item = item
