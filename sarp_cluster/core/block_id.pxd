from libc.stdint cimport uint32_t, uint64_t

cdef extern from "xxh3.h" nogil:
    uint64_t xxh3_64(const void* data, size_t length, uint64_t seed) noexcept
    uint64_t xxh3_two_words(uint64_t first, uint64_t last, size_t length, uint64_t seed) noexcept
    uint64_t xxh3_read64(const void* data) noexcept


cdef struct BlockIdKey:
    # Three rounds: x ^= offset; x *= multiplier (odd); x ^= x >> 32. Each step can be undone, so the whole can.
    uint64_t[3] offsets
    uint64_t[3] multipliers
    uint64_t[3] inverses  # multipliers[i] * inverses[i] == 1 modulo 2**64


cdef inline uint64_t permute(const BlockIdKey* key, uint64_t wire_id) noexcept nogil:
    cdef uint64_t x = wire_id
    x = (x ^ key.offsets[0]) * key.multipliers[0]
    x ^= x >> 32
    x = (x ^ key.offsets[1]) * key.multipliers[1]
    x ^= x >> 32
    x = (x ^ key.offsets[2]) * key.multipliers[2]
    return x ^ (x >> 32)


cdef inline uint64_t unpermute(const BlockIdKey* key, uint64_t internal_id) noexcept nogil:
    cdef uint64_t x = internal_id
    x ^= x >> 32
    x = (x * key.inverses[2]) ^ key.offsets[2]
    x ^= x >> 32
    x = (x * key.inverses[1]) ^ key.offsets[1]
    x ^= x >> 32
    return (x * key.inverses[0]) ^ key.offsets[0]


cdef class NamespaceKey:
    cdef BlockIdKey key
    cdef bytes _mapped(self, object ids, bint inwards)
    cdef void permute_many(self, const uint64_t* source, uint64_t* target, Py_ssize_t count) noexcept nogil
    cdef void unpermute_many(self, const uint64_t* source, uint64_t* target, Py_ssize_t count) noexcept nogil
