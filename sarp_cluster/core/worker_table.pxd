from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef struct WorkerState:
    uint32_t generation
    uint64_t rank              # ascends in the order of (instance_id, dp_rank)
    int64_t seq                # highest applied in this generation; -1: none


cdef class WorkerTable:
    cdef WorkerState* state
    cdef uint32_t capacity
    cdef readonly uint32_t count
    cdef readonly list names
    cdef dict index
    cdef list order

    cdef int rank(self, uint32_t worker, Py_ssize_t place) except -1

    cdef inline bint alive(self, uint32_t worker, uint32_t generation) noexcept nogil:
        """Does a location of this worker and generation still count? A record may name anything, workers unknown here too."""
        return worker < self.count and self.state[worker].generation == generation
