from libc.stdint cimport uint8_t, uint32_t, uint64_t

from sarp_cluster.core.segment cimport SegmentBatch
from sarp_cluster.storage.log_files cimport FILES_MAX, LogFiles


cdef struct Chunk:
    uint32_t file
    uint64_t begin             # offset in the file
    uint64_t length
    uint64_t capacity
    uint8_t* data


cdef struct ReadRange:
    uint64_t place
    int item
    int is_delta
    uint64_t at                # in the scratch buffer
    int arrived


cdef class LogTail:
    cdef Chunk* chunk
    cdef int chunks
    cdef int chunk_capacity
    cdef int sealed            # leading chunks that are being written
    cdef int descriptor[FILES_MAX]  # by file; -1: not open. Never moves: helper threads read it
    cdef readonly uint32_t file
    cdef readonly uint64_t offset
    cdef readonly uint64_t lsn
    cdef readonly uint32_t incarnation
    cdef readonly uint64_t file_bytes_max
    cdef bytes header              # of the payload of a file's header record what does not change
    cdef uint64_t header_end       # where the header of the present file ends
    cdef readonly LogFiles files   # the books of all log files
    cdef public object journal     # called before a group ends; returns payloads of records of type ROUTING. Or None
    cdef readonly uint64_t bytes_appended
    cdef readonly uint64_t calls
    cdef readonly uint64_t damaged

    cdef int begin_file(self) except -1
    cdef uint8_t* room(self, uint64_t size) except NULL
    cdef const uint8_t* in_memory(self, uint64_t place) noexcept nogil
    cdef int read(self, SegmentBatch batch, bint wait) except -1
    cdef int make_room_in_file(self, uint64_t size) except -1
    cdef int read_ranges(self, ReadRange* ranges, int count, uint8_t* scratch, bint wait) noexcept nogil
