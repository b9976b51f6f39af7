"""A row of the segment table: what is known of a segment without reading it."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from sarp_cluster.core.segment cimport SegmentColumns

cdef enum:
    PAGE_ROWS = 1024


cdef struct SegmentRow:        # 40 bytes; the same in a snapshot
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
    uint16_t stale             # 1: the directory may have postings of what the slot was before (core.removal)


cdef inline void fill_row(SegmentRow* row, const SegmentColumns* columns) noexcept nogil:
    """A segment's new state; who hangs on it does not change."""
    row.image = columns.image
    row.delta = columns.delta
    row.parent = columns.parent
    row.origin = columns.origin
    row.namespace_id = columns.namespace_id
    row.window = columns.window
    row.tag = columns.tag
    row.fork = columns.fork
    row.count = columns.count


cdef inline bint fits(const SegmentRow* row, uint16_t tag, int count_before, bint had_delta) noexcept nogil:
    """Is the row as the record of a change says it was?"""
    if count_before == 0:
        return row.count == 0
    return row.count == count_before and row.tag == tag and (row.delta != 0) == had_delta
