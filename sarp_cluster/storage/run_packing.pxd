from libc.stdint cimport uint8_t, uint32_t, uint64_t

from sarp_cluster.core.run_merge cimport SOURCES_MAX

cdef enum:
    CHUNK_ROWS = 1489
    ROWS_AT = 5960             # in a chunk, behind the column of slots
    PACKED_CHUNKS = 8          # at once: 512 KiB


cdef struct RowSource:         # rows in the order of their slots
    const uint32_t* slot       # of what is in memory now
    const uint8_t* row
    size_t at                  # the next one, of `count`
    size_t count
    int descriptor             # of a run file; -1: all is in memory
    uint64_t offset            # of its first chunk of rows
    const uint32_t* size       # rows in each chunk, every second word (run_file.ROW_ENTRY)
    const uint32_t* checksum   # of each chunk
    uint32_t chunk             # the next one to read, of `chunks`
    uint32_t chunks
    uint8_t* memory            # for one chunk


cdef class RowMerge:
    cdef RowSource source[SOURCES_MAX]
    cdef uint64_t head[SOURCES_MAX]    # slot of each source's next row
    cdef int sources
    cdef list keep
    cdef int failed            # the source that could not be read
    cdef int error             # and why: an errno; 0: its bytes are not those that were written

    cdef RowSource* add(self, object keep) except NULL
    cdef int advance(self, int number) noexcept nogil
    cdef int fill(self, uint8_t* to) noexcept nogil


cdef class RunPacker:
    cdef uint8_t* memory
    cdef int chunks
    cdef uint32_t checksum[PACKED_CHUNKS]
    cdef uint32_t entry[2 * PACKED_CHUNKS]
