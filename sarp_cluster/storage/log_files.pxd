from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    FILES_MAX = 0x10000        # a place has 16 bits for the file
    ALL_COUNTED = 0xFFFFFFFF


cdef class LogFiles:
    cdef uint64_t* length          # by file; 0: there is no such file
    cdef int64_t* live             # by file: bytes that segments below counted_end point to
    cdef uint32_t counted_end      # slots from here on are not counted yet; ALL_COUNTED
    cdef readonly set listed       # files that a header names: not those that were reclaimed
    cdef readonly dict header_bytes  # length of the header of each file that was begun by this process
    cdef readonly uint64_t disk_bytes
    cdef readonly int64_t live_bytes

    cdef inline void grow(self, uint32_t file, uint64_t size) noexcept nogil:
        """A record of this size was appended to a file."""
        self.length[file] += size
        self.disk_bytes += size

    cdef void count_place(self, uint32_t slot, uint64_t place, int sign) noexcept nogil
