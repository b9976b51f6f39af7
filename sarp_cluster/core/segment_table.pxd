from libc.stdint cimport uint32_t

from sarp_cluster.core.changed_rows cimport ChangedRows
from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.row_patches cimport RowPatches
from sarp_cluster.core.segment cimport SegmentColumns
from sarp_cluster.core.segment_row cimport PAGE_ROWS, SegmentRow

cdef enum:
    MISSED_MAX = 64            # pages that are noted as missed until clear_missed


cdef class SegmentTable:
    cdef SegmentRow** page     # of `pages`; `nothing` where a page is not loaded
    cdef SegmentRow* nothing   # the shared page of zero rows, read-only
    cdef size_t pages
    cdef size_t page_capacity
    cdef uint32_t next_slot
    cdef uint32_t* free_slot
    cdef size_t free_count
    cdef size_t free_capacity
    cdef readonly size_t segments
    cdef readonly size_t blocks
    cdef readonly size_t block_entries
    cdef readonly size_t deltas
    cdef readonly size_t version

    cdef readonly size_t unloaded_pages
    cdef size_t lazy_pages     # pages that once were unloaded: 0 .. lazy_pages-1
    cdef uint32_t missed[MISSED_MAX]
    cdef readonly int missed_count
    cdef bint replaying        # from begin_lazy until finish_replay: no free slots are known
    cdef readonly dict stale   # slots whose row is stale -> number of the mark
    cdef readonly size_t stale_marks
    cdef RowPatches patches
    cdef ChangedRows changes

    cdef uint32_t allocate(self) except 0
    cdef void release(self, uint32_t slot) noexcept
    cdef int store(self, const SegmentColumns* columns) except -1
    cdef int mark_stale(self, uint32_t slot) except -1
    cdef int add_page(self) except -1
    cdef int reserve_pages(self, size_t pages) except -1
    cdef bint restore(self, const SegmentColumns* columns, bint gaps) except -1
    cdef bint may_be_next(self, uint32_t slot) noexcept
    cdef bint names_segment(self, uint32_t slot, uint32_t other) noexcept
    cdef int take_rows(self, size_t page) except -1
    cdef int check_loaded(self, uint32_t slot) except -1
    cdef void miss(self, uint32_t page) noexcept nogil

    cdef inline SegmentRow* row(self, uint32_t slot) noexcept nogil:
        """A segment's row. Where its page is not loaded: a zero row, not to be written, and the page is noted as missed."""
        cdef SegmentRow* page = self.page[(slot - FIRST_SLOT) // PAGE_ROWS]
        if self.unloaded_pages and page == self.nothing:
            self.miss((slot - FIRST_SLOT) // PAGE_ROWS)
        return &page[(slot - FIRST_SLOT) % PAGE_ROWS]

    cdef inline bint loaded(self, uint32_t slot) noexcept nogil:
        """Is the row's page loaded?"""
        return self.page[(slot - FIRST_SLOT) // PAGE_ROWS] != self.nothing

    cdef inline void touch(self, uint32_t slot) noexcept nogil:
        """Call it before a loaded row is changed."""
        self.changes.touch(&self.page[(slot - FIRST_SLOT) // PAGE_ROWS][(slot - FIRST_SLOT) % PAGE_ROWS], slot - FIRST_SLOT)

    cdef inline void load(self, uint32_t slot, SegmentColumns* columns) noexcept nogil:
        """What the table knows of a segment; its records are still to be read."""
        cdef SegmentRow* row = self.row(slot)
        columns.slot = slot
        columns.tag = row.tag
        columns.window = row.window
        columns.image = row.image
        columns.delta = row.delta
        columns.namespace_id = row.namespace_id
        columns.parent = row.parent
        columns.origin = row.origin
        columns.parent_tag = self.row(row.parent).tag if row.parent else 0
        columns.origin_tag = self.row(row.origin).tag if row.origin else 0
        columns.fork = row.fork
        columns.count = row.count
        columns.count_before = row.count
        columns.image_count = 0
        columns.state = 0
        columns.write = 0
        columns.origin_item = -1
        columns.matched = 0
        columns.runs_begin = 0
        columns.runs_count = 0
