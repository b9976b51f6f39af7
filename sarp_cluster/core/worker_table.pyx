# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Workers: their dense indexes, the generation of their caches, and the last change of each (design §6).

A location run whose generation is not its worker's is dead: one store here ends everything a worker held.
"""

from bisect import bisect_left

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, realloc

from sarp_cluster import limits
from sarp_cluster.errors import TooLargeError


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

    def add(self, instance_id, dp_rank):
        """Index of a worker, entered in generation 0 if it is new."""
        cdef uint32_t capacity, i
        cdef WorkerState* state
        name = (instance_id, dp_rank)
        known = self.index.get(name)
        if known is not None:
            return known
        if self.count >= limits.WORKERS_MAX:
            raise TooLargeError(f"the index knows its limit of {limits.WORKERS_MAX} workers", field="worker")
        if self.count == self.capacity:
            capacity = max(64, self.capacity * 2)
            state = <WorkerState*>realloc(self.state, capacity * sizeof(WorkerState))
            if state == NULL:
                raise MemoryError("worker table")
            self.state = state
            self.capacity = capacity
        self.state[self.count] = WorkerState(0, 0, -1)
        self.index[name] = self.count
        self.names.append(name)
        # Ranks let answers be sorted by worker without comparing names. Workers are few and seldom new.
        place = bisect_left(self.order, name, key=self.names.__getitem__)
        self.order.insert(place, self.count)
        self.count += 1
        for i in range(place, self.count):
            self.state[<uint32_t>self.order[i]].rank = i
        return self.count - 1

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
