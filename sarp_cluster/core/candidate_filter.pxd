# Candidate filters (paper §4.3): N fields, each a fingerprint of the sequence through the end of one region.
#
# Field i (from 0) is taken from the low bits of the ID of its region's last block, the block
# point + lead + (i + 1) * stride - 1. Block IDs are chained and were permuted under the namespace's key, so their bits are
# fingerprints already. Fields are packed from the most significant bit of `high` on; a 64-bit filter leaves `low` zero. A
# field whose block does not exist is zero, in candidate and query alike.
#
# The paper's layout (64 bits): 8 fields of 8 bits, stride 2. Ours (128 bits, DEVIATION): stride 1; no field for the block at
# the point itself, for which the routing key stands already (lead 1); and the first field, where a hot prompt's thousands of
# continuations part, is wider than the rest. docs/decisions/0002 has the measurement.
#
# First mismatching field j (from 0): at most lead + (j + 1) * stride - 1 blocks from the point match. All fields equal: the
# bound is the segment's end, since later points may have been pruned (design §4; DEVIATION from the paper's L_max).

from libc.stdint cimport uint64_t

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
    cdef int block = point + p.lead + p.stride - 1
    cdef int shift = 64 - p.first_bits
    cdef int word = 0
    words[0] = 0
    words[1] = 0
    if p.filters and block < count:
        words[0] = (ids[block] & p.first_mask) << shift
        block += p.stride
        while block < count:
            shift -= 8
            if shift < 0:
                word += 1
                if word > p.wide:
                    break
                shift = 56
            words[word] |= (ids[block] & p.field_mask) << shift
            block += p.stride
    high[0] = words[0]
    low[0] = words[1]


cdef inline int equal_fields(
    const Parameters* p, uint64_t high, uint64_t low, uint64_t query_high, uint64_t query_low
) noexcept nogil:
    """Leading fields that agree; p.fields when all do."""
    cdef uint64_t difference = high ^ query_high
    cdef int bit
    if difference:
        bit = sarp_clz64(difference)
    elif p.wide and low != query_low:
        bit = 64 + sarp_clz64(low ^ query_low)
    else:
        return p.fields
    return 0 if bit < p.first_bits else 1 + ((bit - p.first_bits) >> 3)


cdef inline int match_bound(const Parameters* p, int equal, int point, int end) noexcept nogil:
    """Upper bound of the blocks that match, counted from the window's start and clipped to `end`.

    `end` is the shorter of the candidate's and the query's block count in this window.
    """
    cdef int bound
    if equal == p.fields:
        return end
    bound = point + p.lead + (equal + 1) * p.stride - 1
    return bound if bound < end else end
