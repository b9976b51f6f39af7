# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Workers: their dense indexes, the generation of their caches, and the last change of each (design §6).

A location run whose generation is not its worker's is dead: one store here ends everything a worker held.

Ranks let answers be sorted by worker without comparing names. They leave gaps, so that a new worker finds one between its
neighbours' and seldom moves the others'.
"""

from bisect import bisect_left

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from sarp_cluster import limits
from sarp_cluster.errors import TooLargeError

cdef uint64_t RANKS_END = <uint64_t>1 << 63
cdef uint64_t STEP = <uint64_t>1 << 32


cdef class WorkerTable:
    """The workers of an index. Index 0 is the first worker ever seen."""

    def __init__(self):
        self.names = []
        self.index = {}
        self.order = []

    def __dealloc__(self):
        free(self.state)

    def find(self, instance_id, dp_rank):
        """Index of a worker, or None."""
        return self.index.get((instance_id, dp_rank))

    def find_or_next(self, instance_id, dp_rank):
        """Index of a worker, or the one that `add` would give it."""
        known = self.index.get((instance_id, dp_rank))
        if known is not None:
            return known
        if self.count >= limits.WORKERS_MAX:
            raise TooLargeError(f"the index knows its limit of {limits.WORKERS_MAX} workers", field="worker")
        return self.count

    def add(self, instance_id, dp_rank):
        """Index of a worker, entered in generation 0 if it is new."""
        cdef uint32_t capacity
        cdef WorkerState* state
        cdef uint32_t given = self.find_or_next(instance_id, dp_rank)
        if given < self.count:
            return given
        if self.count == self.capacity:
            capacity = max(64, self.capacity * 2)
            state = <WorkerState*>realloc(self.state, capacity * sizeof(WorkerState))
            if state == NULL:
                raise MemoryError("worker table")
            self.state = state
            self.capacity = capacity
        name = (instance_id, dp_rank)
        self.state[given] = WorkerState(0, 0, -1)
        self.index[name] = given
        self.names.append(name)
        self.count += 1
        place = bisect_left(self.order, name, key=self.names.__getitem__)
        self.order.insert(place, given)
        self.rank(given, place)
        return given

    cdef int rank(self, uint32_t worker, Py_ssize_t place) except -1:
        """Rank a worker that now stands at this place in the order."""
        cdef uint64_t below = 0
        cdef uint64_t above = RANKS_END
        cdef Py_ssize_t i
        if place > 0:
            below = self.state[<uint32_t>self.order[place - 1]].rank
        if place + 1 < self.count:
            above = self.state[<uint32_t>self.order[place + 1]].rank
        if above - below < 2:
            for i in range(self.count):
                self.state[<uint32_t>self.order[i]].rank = (i + 1) * (RANKS_END // (self.count + 1))
        elif place + 1 == self.count and above - below > 2 * STEP:
            self.state[worker].rank = below + STEP  # names often ascend: that must not use up the gaps
        elif place == 0 and above > 2 * STEP:
            self.state[worker].rank = above - STEP
        else:
            self.state[worker].rank = below + (above - below) // 2
        return 0

    def rank_of(self, uint32_t index):
        """A worker's rank among all; for checks and tests."""
        return self.state[index].rank

    def generation(self, uint32_t index):
        """The generation of a worker's cache."""
        return self.state[index].generation

    def seq(self, uint32_t index):
        """The highest seq applied in the present generation; -1: none."""
        return self.state[index].seq

    def set_generation(self, uint32_t index, uint32_t generation):
        """Everything the worker held in older generations is dead."""
        self.state[index].generation = generation
        self.state[index].seq = -1

    def set_seq(self, uint32_t index, int64_t seq):
        """Changes up to `seq` are applied."""
        self.state[index].seq = seq
