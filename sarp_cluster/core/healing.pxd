from sarp_cluster.core.matching cimport Search


cdef class HealingSearch(Search):
    cdef int* hole                 # window -> item of a damaged segment that must hold what the query has there, or -1
    cdef int hole_capacity
