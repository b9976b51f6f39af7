from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport SegmentColumns

cdef enum:
    PAGE_ROWS = 1024
    PAGE_WORDS = 16            # 64-bit words of a page's bitmap
    MISSED_MAX = 64            # pages that are noted as missed until clear_missed


cdef struct SegmentRow:        # 40 bytes
    uint64_t image             # where the image stands (segment.pack_place)
    uint64_t delta             # where the delta stands; 0: none
    uint32_t parent
    uint32_t origin
    uint32_t children          # segments whose parent or origin this is
    uint32_t namespace_id
    uint16_t window
    uint16_t tag
    uint8_t fork
    uint8_t count              # blocks; 0: the slot is free
    uint16_t reserved          # 0


cdef class FrozenRows:
    cdef readonly size_t count
    cdef uint32_t* slot
    cdef SegmentRow* row
    cdef object view(self, void* data, size_t length)


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

    # Pages that are not loaded, and what is to be done to them once they are.
    cdef readonly size_t unloaded_pages
    cdef size_t lazy_pages     # pages that once were unloaded: 0 .. lazy_pages-1
    cdef uint32_t missed[MISSED_MAX]
    cdef readonly int missed_count
    cdef bint replaying        # from begin_lazy until finish_replay: no free slots are known
    cdef readonly size_t patched_pages
    cdef uint32_t* patch_first # by page; offsets in `patch`, 0: none
    cdef uint32_t* patch_last
    cdef uint64_t* patch       # words; the first is not used
    cdef size_t patch_words
    cdef size_t patch_capacity
    cdef uint64_t* replaced    # places of records that replay found to be dead
    cdef size_t replaced_count
    cdef size_t replaced_capacity

    # Changed rows: one bit a row, one count a page.
    cdef uint64_t* dirty
    cdef uint16_t* dirty_count
    cdef readonly size_t dirty_rows
    cdef uint64_t* frozen
    cdef uint64_t* copied
    cdef uint32_t* frozen_begin    # by page: its first row in `frozen_rows`; one more than pages
    cdef size_t frozen_pages       # pages there were at the freeze
    cdef size_t frozen_hand        # pages before it are copied
    cdef size_t frozen_copied
    cdef bint freezing             # from freeze until all rows are copied
    cdef SegmentRow* frozen_row    # its rows
    cdef FrozenRows frozen_rows    # from freeze until release_frozen or thaw

    cdef uint32_t allocate(self) except 0
    cdef void release(self, uint32_t slot) noexcept
    cdef int store(self, const SegmentColumns* columns) except -1
    cdef int remove(self, uint32_t slot) except -1
    cdef int add_page(self) except -1
    cdef int reserve_pages(self, size_t pages) except -1
    cdef bint restore(self, const SegmentColumns* columns) except -1
    cdef bint replay_image(self, const SegmentColumns* columns, int count_before, bint had_delta) except -1
    cdef bint replay_delta(
        self, uint32_t slot, uint16_t tag, uint32_t namespace_id, uint64_t place, int count, int count_before, bint had_delta
    ) except -1
    cdef bint replay_removal(self, const SegmentColumns* columns) except -1
    cdef bint may_be_next(self, uint32_t slot) noexcept
    cdef bint names_segment(self, uint32_t slot, uint32_t other) noexcept
    cdef int adopt(self, uint32_t slot, int change) noexcept
    cdef int reserve_patches(self, size_t words) except -1
    cdef uint64_t* add_patch(self, uint32_t slot, int kind, int count_before, bint had_delta, size_t words) noexcept
    cdef int apply_patches(self, size_t page, SegmentRow* rows) except -1
    cdef int touch_patched(self, size_t page) noexcept
    cdef int forget_patches(self) noexcept
    cdef int release_free_rows(self, size_t page) noexcept
    cdef int check_loaded(self, uint32_t slot) except -1
    cdef int note_replaced(self, uint64_t place) except -1
    cdef int install(self, size_t page, const uint32_t* slot, const uint8_t* row, size_t count) except -1
    cdef void miss(self, uint32_t page) noexcept nogil
    cdef void copy_row(self, uint32_t slot) noexcept nogil
    cdef bint page_left(self, size_t page) noexcept nogil
    cdef size_t copy_page(self, size_t page, size_t limit) noexcept nogil

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
        """Call it before a loaded row is changed: a snapshot under way copies it first, and the next one will have it."""
        cdef uint32_t index = slot - FIRST_SLOT
        cdef uint64_t bit = <uint64_t>1 << (index % 64)
        if self.freezing and self.frozen[index // 64] & bit:
            self.copy_row(slot)
        if not self.dirty[index // 64] & bit:
            self.dirty[index // 64] |= bit
            self.dirty_count[index // PAGE_ROWS] += 1
            self.dirty_rows += 1

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
