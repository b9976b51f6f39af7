# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Segment table: slot -> where a segment's records stand, and how segments hang together (design §5).

Rows are 40 bytes in pages of 1,024, so that growing never moves a row and has no long stop. Slots below FIRST_SLOT are not
used (see posting_tree). A slot that was freed is used again under a new tag: a stale reference (slot, tag) is recognised.

**Lazy loading.** After `begin_lazy` the pages that a snapshot has are *unloaded*: they share one read-only page of zero rows.
`row` on one of them gives a zero row and notes the page as missed. A search looks at `missed_count` after a step; where it is
not 0 the step is void: the caller has the pages read (`install_page`) and takes it again. While the log behind the snapshot
is replayed, changes of unloaded rows are kept as *patches*, in order, and applied when their page is installed. Counters do
not wait for that: the records say what was there before. Everything else that changes a row wants its page loaded.

**Snapshots.** Each row has a bit that says whether it was changed since the last `freeze`. `freeze` sets the changed rows
apart; `copy_frozen` copies them in slices while the table goes on to change, and a row that is changed before its turn is
copied first (`touch`). So what `take_frozen` gives is the state at the freeze, and nobody was stopped for it.

Invariants (checked by validate(), which wants all pages loaded):
  S1  a parent lies one window before its child, is of the same namespace and is full;
  S2  an origin lies in the same window and namespace, and covers the block before the fork by its own blocks
      (origin.fork < fork <= origin.count); fork is 0 exactly where there is no origin;
  S3  children counts the segments that name this one as parent or origin;
  S4  segments, blocks (each at its home), block entries (copies too) and deltas are exact, patches that wait included;
  S5  unloaded_pages pages are unloaded, and only those have patches;
  S6  a slot on the free list is free, below next_slot, in a loaded page, and stands there once;
  S7  a row that differs from its state at the last freeze is marked dirty; dirty_count and dirty_rows count the marks;
  S8  while a snapshot is under way, each frozen row is copied once, in the state it had at the freeze.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from sarp_cluster.core.segment cimport SEGMENT_BLOCKS, SegmentColumns, sarp_popcount64

from sarp_cluster import limits
from sarp_cluster.errors import CorruptRecordError, InvariantViolationError, TooLargeError

cdef extern from *:
    """
    /* Constant, so that a stray write into a page that is not loaded ends the process. */
    static const unsigned long long sarp_no_rows[1024 * 40 / 8];
    static inline int sarp_lowest64(unsigned long long x) { return __builtin_ctzll(x); }
    """
    const void* sarp_no_rows
    int sarp_lowest64(unsigned long long x) noexcept nogil

cdef uint32_t SLOT_MAX = limits.SEGMENTS_MAX
cdef uint32_t SLOTS_AHEAD_MAX = limits.REQUEST_BLOCKS_MAX

cdef enum:
    # What a patch does to its row, and how many words it takes.
    ROW = 1                    # the whole row but for its children
    DELTA = 2                  # another delta
    CHILD = 3                  # one child more
    UNCHILD = 4                # one less
    FREE = 5                   # the segment is gone
    ROW_WORDS = 6
    DELTA_WORDS = 3
    HEADER_WORDS = 1

cdef struct PatchHeader:       # 8 bytes
    uint32_t next              # offset of the page's next patch; 0: the last
    uint16_t row               # in the page
    uint8_t kind
    uint8_t before             # blocks the row had, and bit 7: it had a delta

cdef struct DeltaPatch:
    uint64_t place
    uint16_t tag
    uint8_t count


cdef inline int popcount_below(const uint64_t* word, uint32_t index) noexcept nogil:
    """Bits set below a bit of a page's bitmap."""
    cdef int count = 0
    cdef uint32_t i
    for i in range(index // 64):
        count += sarp_popcount64(word[i])
    return count + sarp_popcount64(word[index // 64] & ((<uint64_t>1 << (index % 64)) - 1))


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


cdef uint64_t* grown_bits(uint64_t* bits, size_t pages, size_t capacity) except NULL:
    """A bitmap of `pages` pages with room for `capacity`, the new ones zero."""
    cdef uint64_t* grown = <uint64_t*>realloc(bits, capacity * PAGE_WORDS * sizeof(uint64_t))
    if grown == NULL:
        raise MemoryError("segment table")
    memset(grown + pages * PAGE_WORDS, 0, (capacity - pages) * PAGE_WORDS * sizeof(uint64_t))
    return grown


cdef class Column:
    """Memory of frozen rows as a read-only buffer of bytes."""
    cdef FrozenRows owner
    cdef void* data
    cdef Py_ssize_t length

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.length, True, flags)


cdef class FrozenRows:
    """Rows as they were at a freeze, by slot. Never changes once it was taken."""

    def __dealloc__(self):
        free(self.slot)
        free(self.row)

    cdef object view(self, void* data, size_t length):
        cdef Column column = Column()
        column.owner = self
        column.data = data
        column.length = length
        return memoryview(column)

    @property
    def slots(self):
        """Their slots (u32), ascending."""
        return self.view(self.slot, self.count * sizeof(uint32_t)).cast("I")

    @property
    def rows(self):
        """The rows, 40 bytes each, in the same order."""
        return self.view(self.row, self.count * sizeof(SegmentRow))


cdef class SegmentTable:
    """All segments of one index. Owned by one thread."""

    def __cinit__(self):
        self.next_slot = FIRST_SLOT
        self.nothing = <SegmentRow*>sarp_no_rows

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.pages):
            if self.page[i] != self.nothing:
                free(self.page[i])
        free(self.page)
        free(self.free_slot)
        free(self.patch_first)
        free(self.patch_last)
        free(self.patch)
        free(self.replaced)
        free(self.dirty)
        free(self.dirty_count)
        free(self.frozen)
        free(self.copied)
        free(self.frozen_begin)

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
        """Make room for so many pages in all that has one entry a page."""
        cdef size_t capacity = max(16, self.page_capacity)
        cdef size_t more
        cdef void* memory
        if pages <= self.page_capacity:
            return 0
        while capacity < pages:
            capacity *= 2
        more = capacity - self.page_capacity
        memory = realloc(self.page, capacity * sizeof(SegmentRow*))
        if memory == NULL:
            raise MemoryError("segment table")
        self.page = <SegmentRow**>memory
        memory = realloc(self.dirty_count, capacity * sizeof(uint16_t))
        if memory == NULL:
            raise MemoryError("segment table")
        self.dirty_count = <uint16_t*>memory
        memset(self.dirty_count + self.page_capacity, 0, more * sizeof(uint16_t))
        memory = realloc(self.frozen_begin, (capacity + 1) * sizeof(uint32_t))
        if memory == NULL:
            raise MemoryError("segment table")
        self.frozen_begin = <uint32_t*>memory
        self.dirty = grown_bits(self.dirty, self.page_capacity, capacity)
        self.frozen = grown_bits(self.frozen, self.page_capacity, capacity)
        self.copied = grown_bits(self.copied, self.page_capacity, capacity)
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
        if not self.loaded(columns.slot):
            raise InvariantViolationError(f"segment {columns.slot} is stored, but its page is not loaded")
        row = self.row(columns.slot)
        if row.count == 0:
            if columns.parent and not self.loaded(columns.parent) or columns.origin and not self.loaded(columns.origin):
                raise InvariantViolationError(f"segment {columns.slot} is stored, but its parent or origin is not loaded")
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
        return 0

    cdef int remove(self, uint32_t slot) except -1:
        """Take out a segment that has no children."""
        cdef SegmentRow* row
        if not self.loaded(slot):
            raise InvariantViolationError(f"segment {slot} is removed, but its page is not loaded")
        row = self.row(slot)
        if row.count == 0 or row.children:
            raise InvariantViolationError(f"segment {slot} is free or has {row.children} children")
        if row.parent and not self.loaded(row.parent) or row.origin and not self.loaded(row.origin):
            raise InvariantViolationError(f"segment {slot} is removed, but its parent or origin is not loaded")
        self.touch(slot)
        self.segments -= 1
        self.blocks -= row.count - row.fork
        self.block_entries -= row.count
        self.deltas -= row.delta != 0
        self.version += 1
        if row.parent:
            self.touch(row.parent)
            self.row(row.parent).children -= 1
        if row.origin:
            self.touch(row.origin)
            self.row(row.origin).children -= 1
        row.count = 0
        self.release(slot)
        return 0

    # --- recovery from the whole log -----------------------------------------------------------------------------------

    cdef bint restore(self, const SegmentColumns* columns) except -1:
        """Enter a segment as its record in the log has it; counters and free slots follow with finish_restore.

        False for a slot that no insert can have taken: they are taken one after the other.
        """
        if not self.may_be_next(columns.slot):
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
        cdef size_t pages
        cdef size_t i
        if self.pages:
            raise InvariantViolationError("only an empty table begins lazily")
        if not FIRST_SLOT <= next_slot <= SLOT_MAX + 1:
            raise CorruptRecordError(f"a snapshot of {next_slot} slots")
        pages = (<size_t>next_slot - FIRST_SLOT + PAGE_ROWS - 1) // PAGE_ROWS
        self.reserve_pages(pages)
        self.patch_first = <uint32_t*>calloc(max(pages, <size_t>1), sizeof(uint32_t))
        self.patch_last = <uint32_t*>calloc(max(pages, <size_t>1), sizeof(uint32_t))
        if self.patch_first == NULL or self.patch_last == NULL:
            raise MemoryError("segment table")
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

    cdef bint replay_image(self, const SegmentColumns* columns, int count_before, bint had_delta) except -1:
        """A whole segment from the log behind the snapshot. False if the record makes no sense."""
        cdef uint32_t slot = columns.slot
        cdef SegmentRow* row
        cdef SegmentRow* patched
        cdef bint new = count_before == 0
        if not self.may_be_next(slot) or had_delta and new or count_before > columns.count:
            return False
        if not self.names_segment(slot, columns.parent) or not self.names_segment(slot, columns.origin):
            return False
        while (slot - FIRST_SLOT) // PAGE_ROWS >= self.pages:
            self.add_page()
        self.reserve_patches(ROW_WORDS + 2 * HEADER_WORDS)
        if self.loaded(slot):
            row = self.row(slot)
            if not fits(row, columns.tag, count_before, had_delta):
                return False
            if not new:
                self.note_replaced(row.image)
                self.note_replaced(row.delta)
            self.touch(slot)
            if new:
                row.children = 0
            fill_row(row, columns)
        else:
            patched = <SegmentRow*>self.add_patch(slot, ROW, count_before, had_delta, ROW_WORDS)
            memset(patched, 0, sizeof(SegmentRow))
            fill_row(patched, columns)
        self.next_slot = max(self.next_slot, slot + 1)
        if new:
            self.segments += 1
            self.blocks += columns.count - columns.fork
            if columns.parent:
                self.adopt(columns.parent, 1)
            if columns.origin:
                self.adopt(columns.origin, 1)
        else:
            self.blocks += columns.count - count_before
        self.block_entries += columns.count - count_before
        self.deltas += (columns.delta != 0) - had_delta
        self.version += 1
        return True

    cdef bint replay_delta(
        self, uint32_t slot, uint16_t tag, uint32_t namespace_id, uint64_t place, int count, int count_before, bint had_delta
    ) except -1:
        """A delta from the log behind the snapshot. False if the record makes no sense."""
        cdef SegmentRow* row
        cdef DeltaPatch* patched
        if not FIRST_SLOT <= slot < self.next_slot or count_before == 0 or count < count_before:
            return False
        self.reserve_patches(DELTA_WORDS)
        if self.loaded(slot):
            row = self.row(slot)
            if not fits(row, tag, count_before, had_delta) or row.namespace_id != namespace_id:
                return False
            self.note_replaced(row.delta)
            self.touch(slot)
            row.delta = place
            row.count = count
        else:
            patched = <DeltaPatch*>self.add_patch(slot, DELTA, count_before, had_delta, DELTA_WORDS)
            patched[0] = DeltaPatch(place, tag, count)
        self.blocks += count - count_before
        self.block_entries += count - count_before
        self.deltas += 1 - had_delta
        self.version += 1
        return True

    cdef bint replay_removal(self, const SegmentColumns* columns) except -1:
        """A segment is gone, `columns` say what it was: slot, tag, parent, origin, fork, count, delta. False if that makes
        no sense."""
        cdef uint32_t slot = columns.slot
        cdef SegmentRow* row
        cdef bint had_delta = columns.delta != 0
        if not FIRST_SLOT <= slot < self.next_slot or columns.count == 0:
            return False
        if not self.names_segment(slot, columns.parent) or not self.names_segment(slot, columns.origin):
            return False
        self.reserve_patches(3 * HEADER_WORDS)
        if self.loaded(slot):
            row = self.row(slot)
            if not fits(row, columns.tag, columns.count, had_delta) or row.children:
                return False
            self.note_replaced(row.image)
            self.note_replaced(row.delta)
            self.touch(slot)
            row.count = 0
        else:
            self.add_patch(slot, FREE, columns.count, had_delta, HEADER_WORDS)
        if columns.parent:
            self.adopt(columns.parent, -1)
        if columns.origin:
            self.adopt(columns.origin, -1)
        self.segments -= 1
        self.blocks -= columns.count - columns.fork
        self.block_entries -= columns.count
        self.deltas -= had_delta
        self.version += 1
        return True

    cdef bint names_segment(self, uint32_t slot, uint32_t other) noexcept:
        """Is `other` none, or a slot that a segment in `slot` can name?"""
        return other == 0 or (FIRST_SLOT <= other < self.next_slot and other != slot)

    cdef int adopt(self, uint32_t slot, int change) noexcept:
        """One child more or less. Room for the patch is reserved."""
        if self.loaded(slot):
            self.touch(slot)
            self.row(slot).children += change
        else:
            self.add_patch(slot, CHILD if change > 0 else UNCHILD, 0, False, HEADER_WORDS)
        return 0

    cdef int reserve_patches(self, size_t words) except -1:
        cdef size_t capacity
        cdef uint64_t* patch
        if self.unloaded_pages == 0 or self.patch_words + words <= self.patch_capacity:
            return 0
        capacity = max(4_096, self.patch_capacity * 2)
        if capacity > 0xFFFFFFFFu:
            raise MemoryError("segment table: the log behind the snapshot is too long")
        patch = <uint64_t*>realloc(self.patch, capacity * sizeof(uint64_t))
        if patch == NULL:
            raise MemoryError("segment table")
        self.patch = patch
        self.patch_capacity = capacity
        self.patch_words = max(self.patch_words, <size_t>1)
        return 0

    cdef uint64_t* add_patch(self, uint32_t slot, int kind, int count_before, bint had_delta, size_t words) noexcept:
        """Append a patch, room for which is reserved, to its page's. Returns where what follows its header is to be put."""
        cdef size_t page = (slot - FIRST_SLOT) // PAGE_ROWS
        cdef uint32_t at = self.patch_words
        cdef PatchHeader* header = <PatchHeader*>&self.patch[at]
        header[0] = PatchHeader(0, (slot - FIRST_SLOT) % PAGE_ROWS, kind, count_before | had_delta << 7)
        if self.patch_last[page]:
            (<PatchHeader*>&self.patch[self.patch_last[page]]).next = at
        else:
            self.patch_first[page] = at
            self.patched_pages += 1
        self.patch_last[page] = at
        self.patch_words += words
        return &self.patch[at + HEADER_WORDS]

    cdef int note_replaced(self, uint64_t place) except -1:
        """A record that no row points to any more."""
        cdef size_t capacity
        cdef uint64_t* replaced
        if place == 0:
            return 0
        if self.replaced_count == self.replaced_capacity:
            capacity = max(1_024, self.replaced_capacity * 2)
            replaced = <uint64_t*>realloc(self.replaced, capacity * sizeof(uint64_t))
            if replaced == NULL:
                raise MemoryError("segment table")
            self.replaced = replaced
            self.replaced_capacity = capacity
        self.replaced[self.replaced_count] = place
        self.replaced_count += 1
        return 0

    def take_replaced(self):
        """The places (u64) of records that replay, or patches applied since the last call, left without a row."""
        places = memoryview(bytes((<const uint8_t*>self.replaced)[: self.replaced_count * sizeof(uint64_t)])).cast("Q")
        self.replaced_count = 0
        free(self.replaced)
        self.replaced = NULL
        self.replaced_capacity = 0
        return places

    def finish_replay(self):
        """The log behind the snapshot is replayed: from now on slots are handed out."""
        cdef uint32_t slot
        cdef size_t page
        if not self.replaying:
            raise InvariantViolationError("no replay is under way")
        self.replaying = False
        for page in range(self.pages, 0, -1):
            if self.page[page - 1] != self.nothing:
                self.release_free_rows(page - 1)
        self.forget_patches()
        self.version += 1

    cdef int forget_patches(self) noexcept:
        """Give back the memory of the patches once all are applied."""
        if self.patched_pages == 0:
            free(self.patch)
            self.patch = NULL
            self.patch_words = self.patch_capacity = 0
        return 0

    cdef int release_free_rows(self, size_t page) noexcept:
        """Put the free rows of a page that was loaded on the free list."""
        cdef uint32_t begin = FIRST_SLOT + page * PAGE_ROWS
        cdef uint32_t slot
        for slot in range(min(begin + PAGE_ROWS, self.next_slot) - 1, begin - 1, -1):  # the lowest is taken first
            if self.row(slot).count == 0:
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
        return [page for page in range(self.lazy_pages) if self.patch_first[page]] if self.patched_pages else []

    def install_page(self, size_t page, const uint32_t[::1] slots, const uint8_t[::1] rows):
        """Load a page: the slots, ascending, that a snapshot has in it, and their rows; all others are free.

        Raises CorruptRecordError if that cannot be, or not together with the log behind the snapshot; the page is then as
        unloaded as before. A page that is loaded stays as it is.
        """
        if rows.shape[0] != slots.shape[0] * <Py_ssize_t>sizeof(SegmentRow):
            raise InvariantViolationError(f"{slots.shape[0]} slots with {rows.shape[0]} bytes of rows")
        if slots.shape[0]:
            self.install(page, &slots[0], &rows[0], slots.shape[0])
        else:
            self.install(page, NULL, NULL, 0)

    cdef int install(self, size_t page, const uint32_t* slot, const uint8_t* row, size_t count) except -1:
        cdef uint32_t begin = FIRST_SLOT + page * PAGE_ROWS
        cdef SegmentRow* rows
        cdef SegmentRow* own
        cdef size_t i
        if page >= self.lazy_pages:
            raise InvariantViolationError(f"page {page} is in no snapshot")
        if self.page[page] != self.nothing:
            return 0
        rows = <SegmentRow*>calloc(PAGE_ROWS, sizeof(SegmentRow))
        if rows == NULL:
            raise MemoryError("segment table")
        try:
            for i in range(count):
                if not begin <= slot[i] < begin + PAGE_ROWS or slot[i] >= self.next_slot or i and slot[i] <= slot[i - 1]:
                    raise CorruptRecordError(f"page {page} of the segment table has a row for slot {slot[i]}")
                own = &rows[slot[i] - begin]
                memcpy(own, row + i * sizeof(SegmentRow), sizeof(SegmentRow))
                if (own.count > SEGMENT_BLOCKS or own.fork > own.count and own.count or own.reserved
                        or not self.names_segment(slot[i], own.parent) or not self.names_segment(slot[i], own.origin)):
                    raise CorruptRecordError(f"the row of slot {slot[i]} makes no sense")
            self.apply_patches(page, rows)
        except BaseException:
            free(rows)
            raise
        self.page[page] = rows
        self.unloaded_pages -= 1
        if self.patch_first[page]:
            self.touch_patched(page)
            self.patch_first[page] = self.patch_last[page] = 0
            self.patched_pages -= 1
            if not self.replaying:
                self.forget_patches()
        if not self.replaying:
            self.release_free_rows(page)
        return 0

    cdef int touch_patched(self, size_t page) noexcept:
        """Rows with patches changed since the snapshot that the page is from."""
        cdef uint32_t at = self.patch_first[page]
        while at:
            self.touch(FIRST_SLOT + page * PAGE_ROWS + (<PatchHeader*>&self.patch[at]).row)
            at = (<PatchHeader*>&self.patch[at]).next
        return 0

    cdef int apply_patches(self, size_t page, SegmentRow* rows) except -1:
        """Do to a page's rows what the log behind the snapshot did."""
        cdef size_t replaced_count = self.replaced_count
        cdef uint32_t at = self.patch_first[page]
        cdef uint32_t children
        cdef PatchHeader* header
        cdef SegmentRow* row
        cdef SegmentRow* whole
        cdef DeltaPatch* delta
        cdef int before
        cdef bint had_delta, sound
        while at:
            header = <PatchHeader*>&self.patch[at]
            row = &rows[header.row]
            before = header.before & 0x7F
            had_delta = header.before >> 7
            if header.kind == ROW:
                whole = <SegmentRow*>&self.patch[at + HEADER_WORDS]
                sound = fits(row, whole.tag, before, had_delta)
                if sound:
                    children = row.children if before else 0
                    if before:
                        self.note_replaced(row.image)
                        self.note_replaced(row.delta)
                    row[0] = whole[0]
                    row.children = children
            elif header.kind == DELTA:
                delta = <DeltaPatch*>&self.patch[at + HEADER_WORDS]
                sound = fits(row, delta.tag, before, had_delta)
                if sound:
                    self.note_replaced(row.delta)
                    row.delta = delta.place
                    row.count = delta.count
            elif header.kind == FREE:
                sound = fits(row, row.tag, before, had_delta) and row.children == 0
                if sound:
                    self.note_replaced(row.image)
                    self.note_replaced(row.delta)
                    row.count = 0
            elif header.kind == CHILD:
                sound = row.count != 0
                row.children += 1
            else:
                sound = row.count != 0 and row.children != 0
                row.children -= 1
            if not sound:
                self.replaced_count = replaced_count
                raise CorruptRecordError(
                    f"segment {FIRST_SLOT + page * PAGE_ROWS + header.row}: the log behind the snapshot does not fit it"
                )
            at = header.next
        return 0

    # --- snapshots -----------------------------------------------------------------------------------------------------

    def freeze(self):
        """Set apart the rows that changed since the last freeze, as they are now. Returns how many those are.

        `copy_frozen` until nothing is left, `take_frozen`, and `release_frozen` once they are durable, or `thaw`.
        """
        cdef size_t page
        cdef uint32_t begin = 0
        cdef uint64_t* bits
        cdef FrozenRows rows
        if self.frozen_rows is not None:
            raise InvariantViolationError("rows are frozen already")
        if self.patched_pages or self.replaying:
            raise InvariantViolationError(f"{self.patched_pages} pages that changed are not loaded")
        self.reserve_pages(1)
        rows = FrozenRows()
        rows.slot = <uint32_t*>malloc(max(self.dirty_rows, <size_t>1) * sizeof(uint32_t))
        rows.row = <SegmentRow*>malloc(max(self.dirty_rows, <size_t>1) * sizeof(SegmentRow))
        if rows.slot == NULL or rows.row == NULL:
            raise MemoryError("snapshot of the segment table")
        rows.count = self.dirty_rows
        for page in range(self.pages):
            self.frozen_begin[page] = begin
            begin += self.dirty_count[page]
            self.dirty_count[page] = 0
        self.frozen_begin[self.pages] = begin
        bits = self.frozen  # all zero
        self.frozen = self.dirty
        self.dirty = bits
        self.dirty_rows = 0
        self.frozen_pages = self.pages
        self.frozen_hand = 0
        self.frozen_copied = 0
        self.frozen_rows = rows
        self.frozen_row = rows.row
        self.freezing = True
        return rows.count

    cdef void copy_row(self, uint32_t slot) noexcept nogil:
        """Copy a frozen row that is about to change, unless that was done."""
        cdef uint32_t index = slot - FIRST_SLOT
        cdef size_t page = index // PAGE_ROWS
        cdef uint64_t bit = <uint64_t>1 << (index % 64)
        cdef size_t at
        if page < self.frozen_hand or self.copied[index // 64] & bit:
            return
        self.copied[index // 64] |= bit
        at = self.frozen_begin[page] + popcount_below(self.frozen + page * PAGE_WORDS, index % PAGE_ROWS)
        self.frozen_row[at] = self.page[page][index % PAGE_ROWS]
        self.frozen_copied += 1

    cdef size_t copy_page(self, size_t page, size_t limit) noexcept nogil:
        """Copy up to `limit` frozen rows of a page. Returns how many."""
        cdef size_t done = 0
        cdef size_t word
        cdef uint64_t bits
        for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
            bits = self.frozen[word] & ~self.copied[word]
            while bits:
                if done == limit:
                    return done
                self.copy_row(FIRST_SLOT + word * 64 + sarp_lowest64(bits))
                done += 1
                bits &= bits - 1
        return done

    def copy_frozen(self, size_t limit):
        """Copy up to `limit` more of the frozen rows. Returns how many are left."""
        cdef FrozenRows rows = self.frozen_rows
        cdef uint32_t* slot
        cdef size_t page, word, at
        cdef size_t done = 0
        cdef uint64_t bits
        if rows is None:
            raise InvariantViolationError("no rows are frozen")
        if not self.freezing:
            return 0
        slot = rows.slot
        with nogil:
            while self.frozen_hand < self.frozen_pages:
                page = self.frozen_hand
                at = self.frozen_begin[page]
                if self.frozen_begin[page + 1] != at:
                    if done == limit:
                        break
                    done += self.copy_page(page, limit - done)
                    if done == limit and self.page_left(page):
                        break
                    for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                        self.copied[word] = 0
                        bits = self.frozen[word]
                        while bits:
                            slot[at] = FIRST_SLOT + word * 64 + sarp_lowest64(bits)
                            at += 1
                            bits &= bits - 1
                self.frozen_hand += 1
        self.freezing = self.frozen_hand < self.frozen_pages
        return max(rows.count - self.frozen_copied, <size_t>1) if self.freezing else 0

    cdef bint page_left(self, size_t page) noexcept nogil:
        """Are there frozen rows of a page that are not copied?"""
        cdef size_t word
        for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
            if self.frozen[word] & ~self.copied[word]:
                return True
        return False

    def take_frozen(self):
        """(slots, rows) of the frozen rows, once all are copied; they stay as they are for as long as they are wanted."""
        cdef FrozenRows rows = self.frozen_rows
        if rows is None or self.freezing:
            raise InvariantViolationError("the frozen rows are not all copied")
        return rows.slots, rows.rows

    def release_frozen(self):
        """The frozen rows are durable in a snapshot."""
        if self.frozen_rows is None or self.freezing:
            raise InvariantViolationError("the frozen rows are not all copied")
        memset(self.frozen, 0, self.frozen_pages * PAGE_WORDS * sizeof(uint64_t))
        self.frozen_copied = 0
        self.frozen_rows = None

    def thaw(self):
        """The snapshot failed: the frozen rows count as changed again, for the next one."""
        cdef size_t page, word
        cdef int more
        if self.frozen_rows is None:
            raise InvariantViolationError("no rows are frozen")
        for page in range(self.frozen_pages):
            if self.frozen_begin[page] == self.frozen_begin[page + 1]:
                continue
            more = 0
            for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                more += sarp_popcount64(self.frozen[word] & ~self.dirty[word])
                self.dirty[word] |= self.frozen[word]
                self.frozen[word] = self.copied[word] = 0
            self.dirty_count[page] += more
            self.dirty_rows += more
        self.freezing = False
        self.frozen_copied = 0
        self.frozen_rows = None

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
            + self.page_capacity * (sizeof(SegmentRow*) + sizeof(uint16_t) + sizeof(uint32_t))
            + self.page_capacity * 3 * PAGE_WORDS * sizeof(uint64_t)
            + self.lazy_pages * 2 * sizeof(uint32_t)
            + self.free_capacity * sizeof(uint32_t)
            + (self.patch_capacity + self.replaced_capacity) * sizeof(uint64_t)
            + (self.frozen_rows.count * (sizeof(SegmentRow) + sizeof(uint32_t)) if self.frozen_rows is not None else 0)
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
        if not self.loaded(slot):
            raise InvariantViolationError(f"page {(slot - FIRST_SLOT) // PAGE_ROWS} of the segment table is not loaded")
        return 0

    def slots_with_delta(self, uint32_t begin, uint32_t rows, int limit):
        """Up to `limit` slots whose segment has a delta, among `rows` rows from `begin` on, and the slot to go on from.

        Pages that are not loaded are passed over.
        """
        cdef uint32_t slot = max(begin, <uint32_t>FIRST_SLOT)
        cdef uint32_t end = min(<uint64_t>slot + rows, self.next_slot)
        found = []
        while slot < end and len(found) < limit:
            if self.loaded(slot) and self.row(slot).delta and self.row(slot).count:
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
            raise InvariantViolationError(
                f"S4: {counted}, counted {(self.segments, self.blocks, self.block_entries, self.deltas)}"
            )
        self.validate_lists()

    def validate_lists(self):
        """The invariants that hold whatever is loaded: S5 to S8."""
        cdef size_t page, word
        cdef size_t marks = 0
        cdef size_t frozen = 0
        cdef int in_page
        unloaded = [page for page in range(self.pages) if self.page[page] == self.nothing]
        patched = [page for page in range(self.lazy_pages) if self.patch_first[page]]
        if len(unloaded) != self.unloaded_pages or len(patched) != self.patched_pages or not set(patched) <= set(unloaded):
            raise InvariantViolationError(f"S5: {len(unloaded)} pages are unloaded, {len(patched)} have patches")
        free_slots = [self.free_slot[page] for page in range(self.free_count)]
        for slot in free_slots:
            if not FIRST_SLOT <= slot < self.next_slot or not self.loaded(slot) or self.row(slot).count:
                raise InvariantViolationError(f"S6: slot {slot} is on the free list")
        if len(set(free_slots)) != len(free_slots):
            raise InvariantViolationError("S6: a slot is on the free list twice")
        for page in range(self.pages):
            in_page = 0
            for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                in_page += sarp_popcount64(self.dirty[word])
                frozen += sarp_popcount64(self.frozen[word])
            if in_page != self.dirty_count[page]:
                raise InvariantViolationError(f"S7: page {page} has {in_page} changed rows, not {self.dirty_count[page]}")
            marks += in_page
        if marks != self.dirty_rows:
            raise InvariantViolationError(f"S7: {marks} rows are changed, not {self.dirty_rows}")
        if frozen != (self.frozen_rows.count if self.frozen_rows is not None else 0) or self.frozen_copied > frozen:
            raise InvariantViolationError(f"S8: {frozen} rows are frozen, {self.frozen_copied} copied")
