from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport SegmentColumns

cdef enum:
    PAGE_ROWS = 1024


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
    uint16_t reserved


cdef class SegmentTable:
    cdef SegmentRow** page
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

    cdef uint32_t allocate(self) except 0
    cdef void release(self, uint32_t slot) noexcept
    cdef void store(self, const SegmentColumns* columns) noexcept nogil
    cdef int remove(self, uint32_t slot) except -1
    cdef int add_page(self) except -1
    cdef bint restore(self, const SegmentColumns* columns) except -1

    cdef inline SegmentRow* row(self, uint32_t slot) noexcept nogil:
        return &self.page[(slot - FIRST_SLOT) // PAGE_ROWS][(slot - FIRST_SLOT) % PAGE_ROWS]

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
        columns.image_count = 0
        columns.state = 0
        columns.write = 0
        columns.origin_item = -1
        columns.matched = 0
        columns.runs_begin = 0
        columns.runs_count = 0
