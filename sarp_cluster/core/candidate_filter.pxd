# Candidate filters (paper §4.3): N one-byte fields, the first in the most significant byte of `high`.
#
# Field i (from 0) is the low byte of the ID of the last block of region i, the blocks
# [point + i * stride, point + (i + 1) * stride). Block IDs are chained and were permuted under the namespace's key, so
# the byte is already a fingerprint of everything before it. A field whose block does not exist is zero, in candidate
# and query alike. A 64-bit filter leaves `low` zero.
#
# First mismatching field j (from 0): at most (j + 1) * stride - 1 blocks from the point match. All fields equal: the
# bound is the segment's end, since later points may have been pruned (design §4; DEVIATION from the paper's L_max).

from libc.stdint cimport uint64_t, uint8_t

from sarp_cluster.core.parameters cimport Parameters


cdef extern from *:
    """
    static inline int sarp_clz64(unsigned long long x) { return __builtin_clzll(x); }
    """
    int sarp_clz64(unsigned long long x) noexcept nogil


cdef inline void make_filter(
    const Parameters* p, const uint64_t* ids, int count, int point, uint64_t* high, uint64_t* low
) noexcept nogil:
    """The filter of a segment (or query window) of `count` blocks at routing point `point`."""
    cdef uint64_t words[2]
    cdef int field, block
    words[0] = 0
    words[1] = 0
    if p.filters:
        block = point + p.stride - 1
        for field in range(p.fields):
            if block >= count:
                break
            words[field >> 3] |= (ids[block] & p.field_mask) << (56 - 8 * (field & 7))
            block += p.stride
    high[0] = words[0]
    low[0] = words[1]


cdef inline int equal_fields(
    const Parameters* p, uint64_t high, uint64_t low, uint64_t query_high, uint64_t query_low
) noexcept nogil:
    """Leading fields that agree; p.fields when all do."""
    cdef uint64_t difference = high ^ query_high
    if difference:
        return sarp_clz64(difference) >> 3
    if p.fields == 8:
        return 8
    difference = low ^ query_low
    if difference:
        return 8 + (sarp_clz64(difference) >> 3)
    return 16


cdef inline int match_bound(const Parameters* p, int equal, int point, int end) noexcept nogil:
    """Upper bound of the blocks that match, counted from the window's start and clipped to `end`.

    `end` is the shorter of the candidate's and the query's block count in this window.
    """
    cdef int bound
    if equal == p.fields:
        return end
    bound = point + (equal + 1) * p.stride - 1
    return bound if bound < end else end
