from libc.stdint cimport uint16_t, uint32_t, uint64_t

from sarp_cluster.core.segment_row cimport PAGE_ROWS, SegmentRow

cdef enum:
    PAGE_WORDS = 16            # 64-bit words of a page's bitmap


cdef class FrozenRows:
    cdef readonly size_t count
    cdef uint32_t* slot
    cdef SegmentRow* row
    cdef object view(self, void* data, size_t length)


cdef class ChangedRows:
    cdef size_t page_capacity
    cdef uint64_t* changed     # one bit a row
    cdef uint16_t* changed_count   # by page
    cdef readonly size_t rows  # changed since the last freeze
    cdef uint64_t* frozen
    cdef uint64_t* copied      # of the frozen rows of pages from `hand` on
    cdef uint32_t* frozen_begin    # by page: its first row in `taken`; one more than pages
    cdef size_t frozen_pages   # pages there were at the freeze
    cdef size_t hand           # pages before it are copied
    cdef size_t copied_count
    cdef bint copying          # from freeze until all rows are copied
    cdef FrozenRows taken      # from freeze until `release` or `thaw`
    cdef SegmentRow* taken_row # its rows

    cdef int reserve(self, size_t capacity) except -1
    cdef size_t bytes(self) noexcept
    cdef size_t freeze(self, size_t pages) except? 0
    cdef size_t copy(self, SegmentRow** page, size_t limit) except? 0
    cdef void copy_row(self, const SegmentRow* row, uint32_t index) noexcept nogil
    cdef size_t copy_page(self, const SegmentRow* rows, size_t page, size_t limit) noexcept nogil
    cdef FrozenRows take(self)
    cdef int release(self) except -1
    cdef int thaw(self) except -1

    cdef inline void touch(self, const SegmentRow* row, uint32_t index) noexcept nogil:
        """Call it before a row, the index-th of all, is changed: a snapshot under way copies it first, and the next one
        will have it."""
        cdef uint64_t bit = <uint64_t>1 << (index % 64)
        if self.copying and self.frozen[index // 64] & bit:
            self.copy_row(row, index)
        if not self.changed[index // 64] & bit:
            self.changed[index // 64] |= bit
            self.changed_count[index // PAGE_ROWS] += 1
            self.rows += 1
