from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from sarp_cluster.core.changed_rows cimport ChangedRows
from sarp_cluster.core.segment_row cimport SegmentRow

cdef enum:
    # What a patch does to its row.
    ROW = 1                    # the whole row but for its children
    DELTA = 2                  # another delta
    CHILD = 3                  # one child more
    UNCHILD = 4                # one less
    FREE = 5                   # the segment is gone
    DROP = 6                   # it is gone, and its postings are not
    # How many words it takes.
    HEADER_WORDS = 1
    ROW_WORDS = 6
    DELTA_WORDS = 3


cdef struct PatchHeader:       # 8 bytes
    uint32_t next              # offset of the page's next patch; 0: it is the last
    uint16_t row               # in the page
    uint8_t kind
    uint8_t before             # blocks the row had, and bit 7: it had a delta


cdef struct DeltaPatch:
    uint64_t place
    uint16_t tag
    uint8_t count


cdef class RowPatches:
    cdef size_t pages
    cdef readonly size_t patched_pages
    cdef uint32_t* first       # by page; offsets in `word`, 0: none
    cdef uint32_t* last
    cdef uint64_t* word        # all patches, one behind the other; the first word is not used
    cdef size_t words
    cdef size_t capacity
    cdef uint64_t* replaced    # places of records that a patch found to be dead
    cdef size_t replaced_count
    cdef size_t replaced_capacity

    cdef int begin(self, size_t pages) except -1
    cdef size_t bytes(self) noexcept
    cdef int reserve(self, size_t words) except -1
    cdef void* add(self, uint32_t index, int kind, int count_before, bint had_delta, size_t words) noexcept
    cdef int apply(self, size_t page, SegmentRow* rows) except -1
    cdef void forget(self, size_t page, ChangedRows changes, const SegmentRow* rows) noexcept
    cdef void free_applied(self) noexcept
    cdef int note_replaced(self, uint64_t place) except -1
    cdef object take_replaced(self)
