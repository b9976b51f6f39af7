from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.parameters cimport Parameters
from sarp_cluster.core.routing_directory cimport RoutingDirectory


cdef class RoutingPoints:
    cdef Parameters parameters
    cdef RoutingDirectory directory
    cdef readonly list due

    cdef int route(self, const uint64_t* ids, int count, uint64_t* key) noexcept nogil
    cdef int successor(self, int point, int kind) noexcept nogil
    cdef tuple count_candidates(self, const uint64_t* ids, int count)
    cdef void touch(self, uint32_t slot, const uint64_t* ids, int count, int count_before) noexcept nogil
    cdef bint registered(self, const uint64_t* ids, int point) noexcept nogil
    cdef int register(self, uint32_t slot, const uint64_t* ids, int count, int count_before) except -1
    cdef int withdraw_at(self, uint32_t slot, const uint64_t* ids, int count, int count_before, int point) except -1
    cdef int register_at(self, uint32_t slot, const uint64_t* ids, int count, int point) except -1
    cdef int register_behind(
        self, uint32_t slot, const uint64_t* ids, int count, int point, int kind, int threshold
    ) except -1
