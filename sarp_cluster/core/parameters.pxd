from libc.stdint cimport uint64_t


cdef struct Parameters:
    int segment_blocks        # S
    int interval              # blocks between base points, S / R
    int refinement_threshold  # τ; INT_MAX when refinement is off
    int pruning_threshold     # 0 when pruning is off: every base point is kept
    int retrieval_max         # MaxRetrieval; INT_MAX for no cap
    int fields                # N, fields of a filter
    int stride                # blocks a field covers
    int first_bits            # bits of the first field; the others have 8
    int lead                  # blocks at a point that its key stands for already, so that no field does
    int reach                 # blocks from a point that key and filter cover
    int wide                  # 128-bit filters
    int filters               # 0: every filter is empty, so that it distinguishes nothing
    int prune
    uint64_t key_mask         # bits of a block ID that serve as routing key
    uint64_t field_mask       # bits of a field that are used
    uint64_t first_mask       # bits of the first field that are used


cdef class SarpParameters:
    cdef Parameters c
