# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Segment table: slot -> where a segment's records stand, and how segments hang together (design §5).

Rows are 40 bytes in pages of 1,024, so that growing never moves a row and has no long stop. Slots below FIRST_SLOT are not
used (see posting_tree). A slot that was freed is used again under a new tag: a stale reference (slot, tag) is recognised.

**Lazy loading.** After `begin_lazy` the pages that a snapshot has are *unloaded*: they share one read-only page of zero rows.
`row` on one of them gives a zero row and notes the page as missed. A search looks at `missed_count` after a step; where it is
not 0 the step is void: the caller has the pages read (`install_page`) and takes it again. While the log behind the snapshot
is replayed, changes of unloaded rows are kept as *patches* (row_patches, table_replay) and applied when their page is
installed. Counters do not wait for that. Everything else that changes a row wants its page loaded.

**Snapshots** have the rows that changed since the one before (changed_rows), copied while the table goes on to change.

Invariants (checked by validate(), which wants all pages loaded):
  S1  a parent lies one window before its child, is of the same namespace and is full;
  S2  an origin lies in the same window and namespace, and covers the block before the fork by its own blocks
      (origin.fork < fork <= origin.count); fork is 0 exactly where there is no origin;
  S3  children counts the segments that name this one as parent or origin;
  S4  segments, blocks (each at its home), block entries (copies too) and deltas are exact, patches that wait included;
  S5  unloaded_pages pages are unloaded, and only those have patches;
  S6  a slot on the free list is free, below next_slot, in a loaded page, and stands there once;
  S7  a row that differs from its state at the last freeze is marked as changed (changed_rows R1, R2);
  S8  `stale` has the slots of the loaded rows that are marked as stale (core.removal).
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from sarp_cluster.core.changed_rows cimport ChangedRows
from sarp_cluster.core.row_patches cimport RowPatches
from sarp_cluster.core.segment cimport SEGMENT_BLOCKS, SegmentColumns
from sarp_cluster.core.segment_row cimport PAGE_ROWS, SegmentRow, fill_row

from sarp_cluster import limits
from sarp_cluster.errors import CorruptRecordError, InvariantViolationError, TooLargeError

cdef extern from *:
    """
    /* Constant, so that a stray write into a page that is not loaded ends the process. */
    static const unsigned long long sarp_no_rows[1024 * 40 / 8];
    """
    const void* sarp_no_rows

cdef uint32_t SLOT_MAX = limits.SEGMENTS_MAX
cdef uint32_t SLOTS_AHEAD_MAX = limits.REQUEST_BLOCKS_MAX


cdef class SegmentTable:
    """All segments of one index. Owned by one thread."""

    def __cinit__(self):
        self.next_slot = FIRST_SLOT
        self.nothing = <SegmentRow*>sarp_no_rows
        self.changes = ChangedRows()
        self.patches = RowPatches()
        self.stale = {}

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.pages):
            if self.page[i] != self.nothing:
                free(self.page[i])
        free(self.page)
        free(self.free_slot)

    cdef uint32_t allocate(self) except 0:
        """A free slot, its row cleared but for the tag, which is new."""
        cdef uint32_t slot
        if self.free_count:
            self.free_count -= 1
            slot = self.free_slot[self.free_count]
            self.touch(slot)
            self.row(slot).tag += 1
            return slot
        slot = self.next_slot
        if slot <= SLOT_MAX and (slot - FIRST_SLOT) // PAGE_ROWS < self.pages and not self.loaded(slot):
            # The rows behind it in its page come to the free list with the page.
            slot += PAGE_ROWS - (slot - FIRST_SLOT) % PAGE_ROWS
        if slot > SLOT_MAX:
            raise TooLargeError(f"the index holds its limit of {limits.SEGMENTS_MAX} segments", field="block_ids")
        if (slot - FIRST_SLOT) // PAGE_ROWS == self.pages:
            self.add_page()
        self.next_slot = slot + 1
        return slot

    cdef int reserve_pages(self, size_t pages) except -1:
        """Make room for so many pages."""
        cdef size_t capacity = max(16, self.page_capacity)
        cdef SegmentRow** page
        if pages <= self.page_capacity:
            return 0
        while capacity < pages:
            capacity *= 2
        page = <SegmentRow**>realloc(self.page, capacity * sizeof(SegmentRow*))
        if page == NULL:
            raise MemoryError("segment table")
        self.page = page
        self.changes.reserve(capacity)
        self.page_capacity = capacity
        return 0

    cdef int add_page(self) except -1:
        self.reserve_pages(self.pages + 1)
        self.page[self.pages] = <SegmentRow*>calloc(PAGE_ROWS, sizeof(SegmentRow))
        if self.page[self.pages] == NULL:
            raise MemoryError("segment table")
        self.pages += 1
        return 0

    cdef void release(self, uint32_t slot) noexcept:
        """Give back a slot. Its memory was reserved when the slot was first allocated, so this cannot fail for long."""
        cdef size_t capacity
        cdef uint32_t* free_slot
        if self.free_count == self.free_capacity:
            capacity = max(64, self.free_capacity * 2)
            free_slot = <uint32_t*>realloc(self.free_slot, capacity * sizeof(uint32_t))
            if free_slot == NULL:
                return  # the slot is lost until the next restart, nothing else
            self.free_slot = free_slot
            self.free_capacity = capacity
        self.free_slot[self.free_count] = slot
        self.free_count += 1

    cdef int store(self, const SegmentColumns* columns) except -1:
        """Enter a new segment or a new state of one, with where its records stand."""
        cdef SegmentRow* row
        self.check_loaded(columns.slot)
        row = self.row(columns.slot)
        cdef bint cut = columns.count < row.count
        if row.count == 0:
            self.check_loaded(columns.parent)
            self.check_loaded(columns.origin)
            self.touch(columns.slot)
            self.segments += 1
            self.blocks += columns.count - columns.fork
            self.block_entries += columns.count
            row.children = 0
            if columns.parent:
                self.touch(columns.parent)
                self.row(columns.parent).children += 1
            if columns.origin:
                self.touch(columns.origin)
                self.row(columns.origin).children += 1
        else:
            self.touch(columns.slot)
            self.blocks += columns.count - row.count
            self.block_entries += columns.count - row.count
            self.deltas -= row.delta != 0
        self.deltas += columns.delta != 0
        self.version += 1
        fill_row(row, columns)
        if cut:
            self.mark_stale(columns.slot)
        return 0

    cdef int mark_stale(self, uint32_t slot) except -1:
        """Postings of what a changed row was before may be left. Until they are not, its slot is given to nobody else."""
        self.row(slot).stale = 1
        self.stale_marks += 1
        self.stale[slot] = self.stale_marks
        return 0

    # --- recovery from the whole log -----------------------------------------------------------------------------------

    cdef bint restore(self, const SegmentColumns* columns, bint gaps) except -1:
        """Enter a segment as its record in the log has it; counters and free slots follow with finish_restore.

        False for a slot that no insert can have taken: they are taken one after the other, and with `gaps` not all are
        in the log any more.
        """
        if not (FIRST_SLOT <= columns.slot <= SLOT_MAX if gaps else self.may_be_next(columns.slot)):
            return False
        while (columns.slot - FIRST_SLOT) // PAGE_ROWS >= self.pages:
            self.add_page()
        self.next_slot = max(self.next_slot, columns.slot + 1)
        fill_row(self.row(columns.slot), columns)
        return True

    cdef bint may_be_next(self, uint32_t slot) noexcept:
        """Can an insert have taken this slot, given those that are known?"""
        return FIRST_SLOT <= slot <= SLOT_MAX and slot <= self.next_slot + SLOTS_AHEAD_MAX

    def finish_restore(self):
        """Count again what the rows imply. Raises CorruptRecordError where a segment names one that is not there."""
        cdef uint32_t slot, other
        cdef SegmentRow* row
        self.segments = self.blocks = self.block_entries = self.deltas = 0
        self.free_count = 0
        for slot in range(FIRST_SLOT, self.next_slot):
            self.row(slot).children = 0
        for slot in range(self.next_slot - 1, FIRST_SLOT - 1, -1):  # the lowest free slot is taken first
            row = self.row(slot)
            if row.count == 0:
                self.release(slot)
                continue
            self.touch(slot)
            self.segments += 1
            self.blocks += row.count - row.fork
            self.block_entries += row.count
            self.deltas += row.delta != 0
            for other in (row.parent, row.origin):
                if other == 0:
                    continue
                if not FIRST_SLOT <= other < self.next_slot or self.row(other).count == 0:
                    raise CorruptRecordError(f"segment {slot} names segment {other}, which the log does not have")
                self.row(other).children += 1
        self.version += 1

    # --- recovery from a snapshot and the log behind it ----------------------------------------------------------------

    def begin_lazy(self, uint32_t next_slot, size_t segments, size_t blocks, size_t block_entries, size_t deltas):
        """Begin as a snapshot has it, none of its pages loaded. `finish_replay` ends the replay of the log behind it."""
        cdef size_t pages, i
        if self.pages:
            raise InvariantViolationError("only an empty table begins lazily")
        if not FIRST_SLOT <= next_slot <= SLOT_MAX + 1:
            raise CorruptRecordError(f"a snapshot of {next_slot} slots")
        pages = (<size_t>next_slot - FIRST_SLOT + PAGE_ROWS - 1) // PAGE_ROWS
        self.reserve_pages(pages)
        self.patches.begin(pages)
        for i in range(pages):
            self.page[i] = self.nothing
        self.pages = self.lazy_pages = self.unloaded_pages = pages
        self.next_slot = next_slot
        self.segments = segments
        self.blocks = blocks
        self.block_entries = block_entries
        self.deltas = deltas
        self.replaying = True
        self.version += 1

    cdef bint names_segment(self, uint32_t slot, uint32_t other) noexcept:
        """Is `other` none, or a slot that a segment in `slot` can name?"""
        return other == 0 or (FIRST_SLOT <= other < self.next_slot and other != slot)

    def take_replaced(self):
        """The places (u64) of records that replay, or patches applied since the last call, left without a row."""
        return self.patches.take_replaced()

    def finish_replay(self):
        """The log behind the snapshot is replayed: from now on slots are handed out."""
        cdef size_t page
        if not self.replaying:
            raise InvariantViolationError("no replay is under way")
        self.replaying = False
        for page in range(self.pages, 0, -1):
            if self.page[page - 1] != self.nothing:
                self.take_rows(page - 1)
        self.patches.free_applied()
        self.version += 1

    cdef int take_rows(self, size_t page) except -1:
        """Put the free rows of a page that was loaded on the free list, and note those that are stale."""
        cdef uint32_t begin = FIRST_SLOT + page * PAGE_ROWS
        cdef uint32_t slot
        for slot in range(min(begin + PAGE_ROWS, self.next_slot) - 1, begin - 1, -1):  # the lowest is taken first
            if self.row(slot).stale:
                self.mark_stale(slot)
            elif self.row(slot).count == 0:
                self.release(slot)
        return 0

    # --- loading pages -------------------------------------------------------------------------------------------------

    cdef void miss(self, uint32_t page) noexcept nogil:
        """Note a page that is wanted. What does not fit is noted when the step is taken again."""
        cdef int i
        for i in range(self.missed_count):
            if self.missed[i] == page:
                return
        if self.missed_count < MISSED_MAX:
            self.missed[self.missed_count] = page
            self.missed_count += 1

    def want_page(self, uint32_t page):
        """Note a page as missed if it is not loaded."""
        if page < self.lazy_pages and self.page[page] == self.nothing:
            self.miss(page)

    def missed_pages(self):
        """The pages that were wanted and are not loaded."""
        return [self.missed[i] for i in range(self.missed_count) if self.page[self.missed[i]] == self.nothing]

    def clear_missed(self):
        """Forget what was missed: before a step is taken again."""
        self.missed_count = 0

    def next_unloaded(self, size_t begin):
        """The first page at or behind `begin` that is not loaded; -1: there is none."""
        cdef size_t page
        for page in range(begin, self.lazy_pages):
            if self.page[page] == self.nothing:
                return page
        return -1

    def pages_with_patches(self):
        """The pages that are not loaded although they changed since the snapshot: the next one needs them."""
        return [page for page in range(self.lazy_pages) if self.patches.first[page]] if self.patches.patched_pages else []

    def install_page(self, size_t page, const uint32_t[::1] slots, const uint8_t[::1] rows):
        """Load a page: the slots, ascending, that a snapshot has in it, and their rows; all others are free.

        Raises CorruptRecordError if that cannot be, or not together with the log behind the snapshot; the page is then as
        unloaded as before. A page that is loaded stays as it is.
        """
        cdef uint32_t begin = FIRST_SLOT + page * PAGE_ROWS
        cdef uint32_t slot, previous = 0
        cdef SegmentRow* own
        cdef SegmentRow* row
        cdef Py_ssize_t i
        if page >= self.lazy_pages or rows.shape[0] != slots.shape[0] * <Py_ssize_t>sizeof(SegmentRow):
            raise InvariantViolationError(f"{rows.shape[0]} bytes for {slots.shape[0]} rows of page {page}")
        if self.page[page] != self.nothing:
            return
        own = <SegmentRow*>calloc(PAGE_ROWS, sizeof(SegmentRow))
        if own == NULL:
            raise MemoryError("segment table")
        try:
            for i in range(slots.shape[0]):
                slot = slots[i]
                if not begin <= slot < begin + PAGE_ROWS or slot >= self.next_slot or slot <= previous:
                    raise CorruptRecordError(f"page {page} of the segment table has a row for slot {slot}")
                previous = slot
                row = &own[slot - begin]
                memcpy(row, &rows[i * sizeof(SegmentRow)], sizeof(SegmentRow))
                if (row.count > SEGMENT_BLOCKS or row.fork > row.count and row.count or row.stale > 1
                        or not self.names_segment(slot, row.parent) or not self.names_segment(slot, row.origin)):
                    raise CorruptRecordError(f"the row of slot {slot} makes no sense")
            self.patches.apply(page, own)
        except BaseException:
            free(own)
            raise
        self.page[page] = own
        self.unloaded_pages -= 1
        self.patches.forget(page, self.changes, own)
        if not self.replaying:
            self.take_rows(page)
            self.patches.free_applied()

    # --- snapshots -----------------------------------------------------------------------------------------------------

    @property
    def patched_pages(self):
        """Unloaded pages that changed since the snapshot."""
        return self.patches.patched_pages

    @property
    def dirty_rows(self):
        """Rows that changed since the last freeze."""
        return self.changes.rows

    def freeze(self):
        """Set apart the rows that changed since the last freeze, as they are now. Returns how many those are."""
        if self.patches.patched_pages or self.replaying:
            raise InvariantViolationError(f"{self.patches.patched_pages} pages that changed are not loaded")
        return self.changes.freeze(self.pages)

    def copy_frozen(self, size_t limit):
        """Copy up to `limit` more of the frozen rows. Returns how many are left."""
        return self.changes.copy(self.page, limit)

    def take_frozen(self):
        """(slots, rows) of the frozen rows, once all are copied; they stay as they are for as long as they are wanted."""
        rows = self.changes.take()
        return rows.slots, rows.rows

    def release_frozen(self):
        """The frozen rows are durable in a snapshot."""
        self.changes.release()

    def thaw(self):
        """The snapshot failed: the frozen rows count as changed again, for the next one."""
        self.changes.thaw()

    # --- looking at it -------------------------------------------------------------------------------------------------

    @property
    def slots_end(self):
        """One past the highest slot in use."""
        return self.next_slot

    @property
    def resident_bytes(self):
        """Bytes of rows, of what there is a page and a free slot, of patches, and of a snapshot under way."""
        return (
            (self.pages - self.unloaded_pages) * PAGE_ROWS * sizeof(SegmentRow)
            + self.page_capacity * sizeof(SegmentRow*)
            + self.free_capacity * sizeof(uint32_t) + self.changes.bytes() + self.patches.bytes()
        )

    def slots_in_use(self, size_t limit):
        """The slots of all segments, in order, in lists of up to `limit`. All pages must be loaded."""
        cdef uint32_t slot = FIRST_SLOT
        while slot < self.next_slot:
            found = []
            while slot < self.next_slot and len(found) < limit:
                self.check_loaded(slot)
                if self.row(slot).count:
                    found.append(slot)
                slot += 1
            if found:
                yield found

    cdef int check_loaded(self, uint32_t slot) except -1:
        if slot and not self.loaded(slot):
            raise InvariantViolationError(f"page {(slot - FIRST_SLOT) // PAGE_ROWS} of the segment table is not loaded")
        return 0

    def slots_from(self, uint32_t begin, uint32_t rows, int limit, bint with_delta=False):
        """Up to `limit` slots of segments, or of those with a delta, among `rows` loaded rows from `begin` on; the slot to
        go on from, 0: the end."""
        cdef uint32_t slot = max(begin, <uint32_t>FIRST_SLOT)
        cdef uint32_t end = min(<uint64_t>slot + rows, self.next_slot)
        found = []
        while slot < end and len(found) < limit:
            if self.loaded(slot) and self.row(slot).count and (self.row(slot).delta or not with_delta):
                found.append(slot)
            slot += 1
        return found, slot if slot < self.next_slot else 0

    def describe(self, uint32_t slot):
        """A row as a dictionary, or None where the slot is free; for checks, tools and tests. Its page must be loaded."""
        cdef SegmentRow* row
        if slot < FIRST_SLOT or slot >= self.next_slot:
            return None
        self.check_loaded(slot)
        row = self.row(slot)
        if row.count == 0:
            return None
        return {
            "slot": slot, "tag": row.tag, "window": row.window, "namespace": row.namespace_id, "parent": row.parent,
            "origin": row.origin, "children": row.children, "fork": row.fork, "count": row.count, "image": row.image,
            "delta": row.delta,
        }

    def validate(self, int segment_blocks):
        """Raise InvariantViolationError for the first violated invariant. All pages must be loaded."""
        if self.unloaded_pages:
            raise InvariantViolationError(f"{self.unloaded_pages} pages of the segment table are not loaded")
        rows = {}
        for slot in range(FIRST_SLOT, self.next_slot):
            row = self.describe(slot)
            if row is not None:
                rows[slot] = row
        children = dict.fromkeys(rows, 0)
        for slot, row in rows.items():
            if row["parent"]:
                parent = rows.get(row["parent"])
                if (parent is None or parent["window"] + 1 != row["window"] or parent["count"] != segment_blocks
                        or parent["namespace"] != row["namespace"]):
                    raise InvariantViolationError(f"S1: {row} has parent {parent}")
                children[row["parent"]] += 1
            if bool(row["origin"]) != (row["fork"] > 0):
                raise InvariantViolationError(f"S2: {row}")
            if row["origin"]:
                origin = rows.get(row["origin"])
                if (origin is None or origin["window"] != row["window"] or origin["namespace"] != row["namespace"]
                        or not origin["fork"] < row["fork"] <= origin["count"]):
                    raise InvariantViolationError(f"S2: {row} has origin {origin}")
                children[row["origin"]] += 1
        for slot, row in rows.items():
            if row["children"] != children[slot]:
                raise InvariantViolationError(f"S3: {row} has {children[slot]} children")
        counted = (
            len(rows), sum(row["count"] - row["fork"] for row in rows.values()),
            sum(row["count"] for row in rows.values()), sum(row["delta"] != 0 for row in rows.values()),
        )
        if counted != (self.segments, self.blocks, self.block_entries, self.deltas):
            kept = (self.segments, self.blocks, self.block_entries, self.deltas)
            raise InvariantViolationError(f"S4: {counted}, counted {kept}")
        self.validate_lists()

    def validate_lists(self):
        """The invariants that hold whatever is loaded: S5 to S7."""
        cdef size_t page
        unloaded = [page for page in range(self.pages) if self.page[page] == self.nothing]
        patched = [page for page in range(self.lazy_pages) if self.patches.first[page]]
        kept = (self.unloaded_pages, self.patches.patched_pages)
        if (len(unloaded), len(patched)) != kept or not set(patched) <= set(unloaded):
            raise InvariantViolationError(f"S5: {len(unloaded)} pages are unloaded, {len(patched)} have patches")
        free_slots = {self.free_slot[page] for page in range(self.free_count)}
        for slot in free_slots:
            if not FIRST_SLOT <= slot < self.next_slot or not self.loaded(slot) or self.row(slot).count or slot in self.stale:
                raise InvariantViolationError(f"S6: slot {slot} is on the free list")
        if len(free_slots) != self.free_count:
            raise InvariantViolationError("S6: a slot is on the free list twice")
        stale = {
            slot for slot in range(FIRST_SLOT, self.next_slot) if self.loaded(slot) and self.row(slot).stale
        }
        if stale != self.stale.keys() and not self.replaying:
            raise InvariantViolationError(f"S8: slots {sorted(stale ^ self.stale.keys())[:3]}")
        self.changes.validate()
