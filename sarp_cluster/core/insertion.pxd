from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.matching cimport Home, Search
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.segment cimport LocationRun, SegmentBatch
from sarp_cluster.core.segment_table cimport SegmentTable
from sarp_cluster.core.worker_table cimport WorkerTable


cdef struct Location:
    uint32_t worker
    uint32_t generation
    int tier                   # -1 in a removal: every tier
    bint has_handle
    uint64_t handle


cdef class Insertion:
    cdef readonly Search search
    cdef RoutingPoints points
    cdef SegmentTable table
    cdef WorkerTable workers
    cdef readonly SegmentBatch writes
    cdef readonly int blocks_added
    cdef readonly int healed   # segments that the last commit restored
    cdef int first             # position from ids[0] from which the worker holds the blocks
    cdef int low               # lowest window that is searched

    cdef int settle(self, int pending) except -2
    cdef int edit(self, int item) except -1
    cdef int hold(self, int item, const Location* location, uint64_t mask) except -1
    cdef int release(self, int item, const Location* location, uint64_t mask) except -1
    cdef int all_homes(self, int window, int matched, Home* homes) except -1
    cdef int hold_window(self, int window, int matched, int begin, int end, const Location* location) except -1
    cdef bint alive(self, const LocationRun* run, const Location* location) noexcept nogil
    cdef int put_run(self, int write, const Location* location, uint64_t mask) except -1
    cdef uint32_t new_segment(self, int window, int fork, uint32_t parent, const Location* location) except 0
    cdef uint32_t extend(self, int window, int matched, const Location* location) except 0
    cdef int choose_writes(self) except -1
    cdef bint all_in_memory(self) noexcept
