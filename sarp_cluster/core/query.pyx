# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A query: its internal block IDs, its windows, and how deep the index may know it.

Wire IDs are turned into internal IDs only as far as they are needed: an insert whose worker newly holds the last few blocks
of a long context looks at those, and at single IDs before them.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from sarp_cluster.core.block_id cimport NamespaceKey


cdef class Query:
    """Block IDs of one sequence, from the window `base_window` on. Reused: `take` starts anew and keeps the buffer."""

    def __dealloc__(self):
        free(self.ids)

    cdef int take(self, bytes wire, NamespaceKey key, uint32_t namespace_id, int base_window) except -1:
        """Take wire IDs (u64 little-endian). `know` turns them into internal ones."""
        cdef Py_ssize_t blocks = len(wire) // 8
        cdef void* memory
        if blocks > self.ids_capacity:
            memory = realloc(self.ids, blocks * sizeof(uint64_t))
            if memory == NULL:
                raise MemoryError("query")
            self.ids = <uint64_t*>memory
            self.ids_capacity = blocks
        self.blocks = <int>blocks
        self.windows = <int>((blocks + self.parameters.segment_blocks - 1) // self.parameters.segment_blocks)
        self.namespace_id = namespace_id
        self.base_window = base_window
        self.wire = wire
        self.key = key
        self.known_from = <int>blocks
        return 0

    cdef int window_blocks(self, int window) noexcept nogil:
        """Blocks of the query in a window."""
        cdef int left = self.blocks - window * self.parameters.segment_blocks
        return left if left < self.parameters.segment_blocks else self.parameters.segment_blocks

    cdef void know(self, int window) noexcept:
        """Fill in the internal IDs from a window on: an insert seldom needs those before its new blocks."""
        cdef int block = window * self.parameters.segment_blocks
        if block < self.known_from:
            self.key.permute_many(
                <const uint64_t*><const char*>self.wire + block, self.ids + block, self.known_from - block
            )
            self.known_from = block

    cdef bint present(self, int window) noexcept:
        """Is the first block of a window a key of the directory?"""
        cdef int block = window * self.parameters.segment_blocks
        cdef uint64_t first
        cdef int state
        if block >= self.known_from:
            first = self.ids[block]
        else:
            self.key.permute_many(<const uint64_t*><const char*>self.wire + block, &first, 1)
        return self.directory.probe(first & self.parameters.key_mask, 0, &state)

    cdef int deepest(self, int low, int high) noexcept:
        """The deepest window in [low, high] whose first key is present; low - 1 if none is.

        Most queries extend what is there, so the search gallops back from the end.
        """
        cdef int absent = high + 1
        cdef int found = low - 1
        cdef int step = 1
        cdef int window = high
        while window >= low:
            if self.present(window):
                found = window
                break
            absent = window
            window -= step
            step *= 2
        while absent - found > 1:
            window = found + (absent - found) // 2
            if self.present(window):
                found = window
            else:
                absent = window
        return found
