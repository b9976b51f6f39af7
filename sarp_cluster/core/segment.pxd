from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    SEGMENT_BLOCKS = 64        # limits.SEGMENT_BLOCKS_MAX: blocks held are one 64-bit mask
    # state of a segment in a batch
    TO_READ = 0
    READ = 1                   # read, its checksum and addresses verified
    DAMAGED = 2                # does not verify: a miss
    # how a changed segment is written
    IMAGE = 1                  # whole
    DELTA = 2                  # what the image lacks


cdef struct LocationRun:
    uint64_t mask              # bit i: the worker holds block i of the segment
    uint64_t handle            # the worker's own 8 bytes
    uint32_t worker            # index in the worker table
    uint32_t generation
    uint8_t tier
    uint8_t has_handle


cdef struct SegmentColumns:
    # what the segment table says
    uint32_t slot
    uint16_t tag
    uint16_t window
    uint64_t image             # where the image stands, see pack_place
    uint64_t delta             # where the delta stands; 0: none
    uint32_t namespace_id
    uint32_t parent            # slot; 0: none
    uint32_t origin            # slot of the segment that holds the blocks before `fork`; 0: none
    uint16_t parent_tag
    uint16_t origin_tag
    uint8_t fork
    uint8_t count              # blocks
    uint8_t count_before       # blocks the table has: where `count` is to change, or 0 in a new segment
    # what the records say
    uint8_t image_count        # blocks in the image; the delta holds the rest
    uint8_t state
    uint8_t write              # 0, IMAGE or DELTA
    int origin_item            # item of the origin in this batch; -1: not in it
    int matched                # leading blocks equal to the query's, once verified
    uint32_t runs_begin        # in the batch's runs
    uint32_t runs_count
    uint64_t ids[SEGMENT_BLOCKS]


cdef class SegmentBatch:
    cdef SegmentColumns* item
    cdef int count
    cdef int capacity
    cdef LocationRun* run
    cdef uint32_t run_count
    cdef uint32_t run_capacity
    cdef int append(self) except -1
    cdef int reserve_runs(self, uint32_t more) except -1
    cdef void clear(self) noexcept nogil


cdef extern from *:
    """
    static inline int sarp_popcount64(unsigned long long x) { return __builtin_popcountll(x); }
    """
    int sarp_popcount64(unsigned long long x) noexcept nogil


cdef inline uint64_t blocks_mask(int begin, int end) noexcept nogil:
    """Bits begin..end-1; none when begin >= end."""
    if begin >= end:
        return 0
    return (~(<uint64_t>0) >> (64 - (end - begin))) << begin


cdef inline int mask_runs(uint64_t mask) noexcept nogil:
    """Runs of consecutive blocks in a mask: what it takes on disk."""
    return sarp_popcount64(mask & ~(mask << 1))


# A place in the log packs into 64 bits: file index (16) | length in 8-byte units (16) | offset in 8-byte units (32).
cdef inline uint64_t pack_place(uint32_t file, uint64_t offset, uint32_t length) noexcept nogil:
    return (<uint64_t>file << 48) | (<uint64_t>(length >> 3) << 32) | (offset >> 3)


cdef inline uint32_t place_file(uint64_t place) noexcept nogil:
    return <uint32_t>(place >> 48)


cdef inline uint64_t place_offset(uint64_t place) noexcept nogil:
    return (place & 0xFFFFFFFFu) << 3


cdef inline uint32_t place_length(uint64_t place) noexcept nogil:
    return <uint32_t>((place >> 32) & 0xFFFFu) << 3
