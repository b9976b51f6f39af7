from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.block_id cimport NamespaceKey
from sarp_cluster.core.parameters cimport Parameters
from sarp_cluster.core.routing_directory cimport RoutingDirectory


cdef class Query:
    cdef Parameters parameters
    cdef RoutingDirectory directory
    cdef bytes wire
    cdef NamespaceKey key
    cdef uint64_t* ids             # internal IDs, filled in from `known_from` on
    cdef int known_from
    cdef Py_ssize_t ids_capacity
    cdef readonly int blocks       # of the query
    cdef readonly int windows
    cdef int base_window           # window of ids[0]
    cdef uint32_t namespace_id

    cdef int take(self, bytes wire, NamespaceKey key, uint32_t namespace_id, int base_window) except -1
    cdef int window_blocks(self, int window) noexcept nogil
    cdef void know(self, int window) noexcept
    cdef bint present(self, int window) noexcept
    cdef int deepest(self, int low, int high) noexcept
