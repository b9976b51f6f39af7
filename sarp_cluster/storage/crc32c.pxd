from libc.stdint cimport uint32_t

cdef extern from "crc32c.h" nogil:
    uint32_t crc32c(uint32_t crc, const void* data, size_t length) noexcept
    uint32_t crc32c_software(uint32_t crc, const void* data, size_t length) noexcept
