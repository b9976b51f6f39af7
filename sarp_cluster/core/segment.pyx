# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Segments in memory: columns of block IDs and location runs, several in one batch.

A batch is what travels between the core and the store: a search lists the segments it wants, the store fills them in; an
insert lists the segments it changed, the store writes them and notes where.

A *location run* says which blocks of a segment one worker (in one generation) holds on one tier. On disk it is a first
block and a count; in memory the blocks are a mask, so that adding, removing and counting are single operations.

Invariants of a segment's runs (kept by insertion, checked by shard.validation):
  R1  at most one run a (worker, tier, handle), and a block is in one run of a (worker, tier);
  R2  runs are sorted by (worker, tier), none is empty, none reaches outside [fork, count).
"""

from libc.stdint cimport uint32_t
from libc.stdlib cimport free, realloc


cdef class SegmentBatch:
    """Segments that are read or written together. Buffers are kept for the next use."""

    def __dealloc__(self):
        free(self.item)
        free(self.run)

    def __len__(self):
        return self.count

    cdef int append(self) except -1:
        """A new item at the end, its fields not set. Returns its index; pointers to items are void after it."""
        cdef int capacity
        cdef SegmentColumns* item
        if self.count == self.capacity:
            capacity = max(16, self.capacity * 2)
            item = <SegmentColumns*>realloc(self.item, capacity * sizeof(SegmentColumns))
            if item == NULL:
                raise MemoryError("segment batch")
            self.item = item
            self.capacity = capacity
        self.count += 1
        return self.count - 1

    cdef int reserve_runs(self, uint32_t more) except -1:
        """Make room for `more` runs at the end of the arena."""
        cdef uint32_t capacity = self.run_capacity
        cdef LocationRun* run
        if self.run_count + more <= capacity:
            return 0
        while capacity < self.run_count + more:
            capacity = max(64, capacity * 2)
        run = <LocationRun*>realloc(self.run, capacity * sizeof(LocationRun))
        if run == NULL:
            raise MemoryError("segment batch")
        self.run = run
        self.run_capacity = capacity
        return 0

    cdef void clear(self) noexcept nogil:
        self.count = 0
        self.run_count = 0

    def describe(self):
        """The items as dictionaries, for checks, tools and tests."""
        cdef SegmentColumns* item
        cdef int i
        cdef uint32_t r
        described = []
        for i in range(self.count):
            item = &self.item[i]
            runs = [
                {
                    "worker": self.run[r].worker,
                    "generation": self.run[r].generation,
                    "tier": self.run[r].tier,
                    "mask": self.run[r].mask,
                    "handle": self.run[r].handle if self.run[r].has_handle else None,
                }
                for r in range(item.runs_begin, item.runs_begin + item.runs_count)
            ] if item.state == READ else []
            described.append({
                "slot": item.slot, "tag": item.tag, "window": item.window, "namespace": item.namespace_id,
                "parent": item.parent, "origin": item.origin, "fork": item.fork, "count": item.count,
                "image_count": item.image_count, "state": item.state, "image": item.image, "delta": item.delta,
                "ids": [item.ids[r] for r in range(item.count)] if item.state == READ else [],
                "runs": runs,
            })
        return described
