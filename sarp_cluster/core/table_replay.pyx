# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Replaying the log behind a snapshot into a segment table of which little or nothing is loaded.

What a record says is done at once to rows that are loaded and kept as a patch for those that are not. The counters of the
table need no row: the record says how many blocks its segment had before, and whether it had a delta.

A record that makes no sense (its segment was not as it says, or names one that cannot be) changes nothing.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.row_patches cimport (
    CHILD,
    DELTA,
    DELTA_WORDS,
    DROP,
    FREE,
    HEADER_WORDS,
    ROW,
    ROW_WORDS,
    UNCHILD,
    DeltaPatch,
)
from sarp_cluster.core.segment cimport SegmentColumns
from sarp_cluster.core.segment_row cimport PAGE_ROWS, SegmentRow, fill_row, fits
from sarp_cluster.core.segment_table cimport SegmentTable


cdef int adopt(SegmentTable table, uint32_t slot, int change) noexcept:
    """One child more or less. Room for the patch is reserved."""
    if table.loaded(slot):
        table.touch(slot)
        table.row(slot).children += change
    else:
        table.patches.add(slot - FIRST_SLOT, CHILD if change > 0 else UNCHILD, 0, False, HEADER_WORDS)
    return 0


cdef bint replay_image(SegmentTable table, const SegmentColumns* columns, bint had_delta) except -1:
    """A whole segment from the log behind the snapshot. False if the record makes no sense.

    With fewer blocks than before, those that it lost are still registered.
    """
    cdef uint32_t slot = columns.slot
    cdef SegmentRow* row
    cdef SegmentRow* patched
    cdef int count_before = columns.count_before
    cdef bint new = count_before == 0
    if not table.may_be_next(slot) or had_delta and new:
        return False
    if not table.names_segment(slot, columns.parent) or not table.names_segment(slot, columns.origin):
        return False
    while (slot - FIRST_SLOT) // PAGE_ROWS >= table.pages:
        table.add_page()
    table.patches.reserve(ROW_WORDS + 2 * HEADER_WORDS)
    if table.loaded(slot):
        row = table.row(slot)
        if not fits(row, columns.tag, count_before, had_delta):
            return False
        if not new:
            table.patches.note_replaced(row.image)
            table.patches.note_replaced(row.delta)
        table.touch(slot)
        if new:
            row.children = 0
        row.stale = not new and (row.stale or columns.count < count_before)
        fill_row(row, columns)
    else:
        patched = <SegmentRow*>table.patches.add(slot - FIRST_SLOT, ROW, count_before, had_delta, ROW_WORDS)
        memset(patched, 0, sizeof(SegmentRow))
        fill_row(patched, columns)
    table.next_slot = max(table.next_slot, slot + 1)
    if new:
        table.segments += 1
        table.blocks += columns.count - columns.fork
        if columns.parent:
            adopt(table, columns.parent, 1)
        if columns.origin:
            adopt(table, columns.origin, 1)
    else:
        table.blocks += columns.count - count_before
    table.block_entries += columns.count - count_before
    table.deltas += (columns.delta != 0) - had_delta
    table.version += 1
    return True


cdef bint replay_delta(
    SegmentTable table, uint32_t slot, uint16_t tag, uint32_t namespace_id, uint64_t place, int count, int count_before,
    bint had_delta
) except -1:
    """A delta from the log behind the snapshot. False if the record makes no sense."""
    cdef SegmentRow* row
    cdef DeltaPatch* patched
    if not FIRST_SLOT <= slot < table.next_slot or count_before == 0 or count < count_before:
        return False
    table.patches.reserve(DELTA_WORDS)
    if table.loaded(slot):
        row = table.row(slot)
        if not fits(row, tag, count_before, had_delta) or row.namespace_id != namespace_id:
            return False
        table.patches.note_replaced(row.delta)
        table.touch(slot)
        row.delta = place
        row.count = count
    else:
        patched = <DeltaPatch*>table.patches.add(slot - FIRST_SLOT, DELTA, count_before, had_delta, DELTA_WORDS)
        patched[0] = DeltaPatch(place, tag, count)
    table.blocks += count - count_before
    table.block_entries += count - count_before
    table.deltas += 1 - had_delta
    table.version += 1
    return True


cdef bint replay_removal(SegmentTable table, const SegmentColumns* columns, bint stale) except -1:
    """A segment is gone, `columns` say what it was: slot, tag, parent, origin, fork, count, delta. `stale`: its postings
    are still there. False if that makes no sense."""
    cdef uint32_t slot = columns.slot
    cdef SegmentRow* row
    cdef bint had_delta = columns.delta != 0
    if not FIRST_SLOT <= slot < table.next_slot or columns.count == 0:
        return False
    if not table.names_segment(slot, columns.parent) or not table.names_segment(slot, columns.origin):
        return False
    table.patches.reserve(3 * HEADER_WORDS)
    if table.loaded(slot):
        row = table.row(slot)
        if not fits(row, columns.tag, columns.count, had_delta) or row.children:
            return False
        table.patches.note_replaced(row.image)
        table.patches.note_replaced(row.delta)
        table.touch(slot)
        row.count = 0
        row.stale = stale
    else:
        table.patches.add(slot - FIRST_SLOT, DROP if stale else FREE, columns.count, had_delta, HEADER_WORDS)
    if columns.parent:
        adopt(table, columns.parent, -1)
    if columns.origin:
        adopt(table, columns.origin, -1)
    table.segments -= 1
    table.blocks -= columns.count - columns.fork
    table.block_entries -= columns.count
    table.deltas -= had_delta
    table.version += 1
    return True
