from libc.stdint cimport uint32_t, uint64_t


cdef struct Holder:
    uint32_t worker
    uint64_t rank
    int reach[4]               # longest prefix by tier, cumulative
    uint64_t mask[4]           # blocks held in the present window, by tier
