# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Which rows of the segment table changed since the last snapshot, and copying them for the next one without a stop.

Each row has a bit. `freeze` sets the marked rows apart: it swaps two bitmaps and adds up the counts of the pages, so a
million rows cost no more than a few. `copy` copies them in slices while the table goes on to change; a row that is changed
before its turn is copied first (`touch`). So the copy is the state at the freeze. The place of a row in the copy is the
number of frozen rows before it: the copy is sorted by slot, whatever the order in which it came to be.

Invariants (checked by validate()):
  R1  changed_count and rows count the marks in `changed`;
  R2  while a snapshot is under way, as many rows are frozen as it has, and none is copied twice.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport sarp_popcount64
from sarp_cluster.core.segment_row cimport PAGE_ROWS, SegmentRow

from sarp_cluster.errors import InvariantViolationError

cdef extern from *:
    """
    static inline int sarp_lowest64(unsigned long long x) { return __builtin_ctzll(x); }
    """
    int sarp_lowest64(unsigned long long x) noexcept nogil


cdef uint64_t* grown_bits(uint64_t* bits, size_t pages, size_t capacity) except NULL:
    """A bitmap of `pages` pages with room for `capacity`, the new ones zero."""
    cdef uint64_t* grown = <uint64_t*>realloc(bits, capacity * PAGE_WORDS * sizeof(uint64_t))
    if grown == NULL:
        raise MemoryError("segment table")
    memset(grown + pages * PAGE_WORDS, 0, (capacity - pages) * PAGE_WORDS * sizeof(uint64_t))
    return grown


cdef inline int popcount_below(const uint64_t* word, uint32_t index) noexcept nogil:
    """Bits set below a bit of a page's bitmap."""
    cdef int count = 0
    cdef uint32_t i
    for i in range(index // 64):
        count += sarp_popcount64(word[i])
    return count + sarp_popcount64(word[index // 64] & ((<uint64_t>1 << (index % 64)) - 1))


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


cdef class ChangedRows:
    """The marks of one segment table. Rows are numbered from 0 on."""

    def __dealloc__(self):
        free(self.changed)
        free(self.changed_count)
        free(self.frozen)
        free(self.copied)
        free(self.frozen_begin)

    cdef int reserve(self, size_t capacity) except -1:
        """Make room for so many pages: more than before."""
        cdef void* memory
        memory = realloc(self.changed_count, capacity * sizeof(uint16_t))
        if memory == NULL:
            raise MemoryError("segment table")
        self.changed_count = <uint16_t*>memory
        memset(self.changed_count + self.page_capacity, 0, (capacity - self.page_capacity) * sizeof(uint16_t))
        memory = realloc(self.frozen_begin, (capacity + 1) * sizeof(uint32_t))
        if memory == NULL:
            raise MemoryError("segment table")
        self.frozen_begin = <uint32_t*>memory
        self.changed = grown_bits(self.changed, self.page_capacity, capacity)
        self.frozen = grown_bits(self.frozen, self.page_capacity, capacity)
        self.copied = grown_bits(self.copied, self.page_capacity, capacity)
        self.page_capacity = capacity
        return 0

    cdef size_t bytes(self) noexcept:
        """Bytes of the marks and of a snapshot under way."""
        cdef size_t total = self.page_capacity * (
            3 * PAGE_WORDS * sizeof(uint64_t) + sizeof(uint16_t) + sizeof(uint32_t)
        )
        if self.taken is not None:
            total += self.taken.count * (sizeof(SegmentRow) + sizeof(uint32_t))
        return total

    cdef size_t freeze(self, size_t pages) except? 0:
        """Set apart what changed. Returns how many rows that are."""
        cdef FrozenRows rows
        cdef uint32_t begin = 0
        cdef uint64_t* bits
        cdef size_t page
        if self.taken is not None:
            raise InvariantViolationError("rows are frozen already")
        rows = FrozenRows()
        rows.slot = <uint32_t*>malloc(max(self.rows, <size_t>1) * sizeof(uint32_t))
        rows.row = <SegmentRow*>malloc(max(self.rows, <size_t>1) * sizeof(SegmentRow))
        if rows.slot == NULL or rows.row == NULL:
            raise MemoryError("snapshot of the segment table")
        rows.count = self.rows
        for page in range(pages):
            self.frozen_begin[page] = begin
            begin += self.changed_count[page]
            self.changed_count[page] = 0
        if pages:
            self.frozen_begin[pages] = begin
        bits = self.frozen  # all zero
        self.frozen = self.changed
        self.changed = bits
        self.rows = 0
        self.frozen_pages = pages
        self.hand = self.copied_count = 0
        self.taken = rows
        self.taken_row = rows.row
        self.copying = True
        return rows.count

    cdef void copy_row(self, const SegmentRow* row, uint32_t index) noexcept nogil:
        """Copy a frozen row, unless that was done."""
        cdef size_t page = index // PAGE_ROWS
        cdef uint64_t bit = <uint64_t>1 << (index % 64)
        if page < self.hand or self.copied[index // 64] & bit:
            return
        self.copied[index // 64] |= bit
        self.copied_count += 1
        self.taken_row[
            self.frozen_begin[page] + popcount_below(self.frozen + page * PAGE_WORDS, index % PAGE_ROWS)
        ] = row[0]

    cdef size_t copy_page(self, const SegmentRow* rows, size_t page, size_t limit) noexcept nogil:
        """Copy up to `limit` frozen rows of a page. Returns how many that were."""
        cdef size_t done = 0
        cdef size_t word
        cdef uint32_t index
        cdef uint64_t bits
        for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
            bits = self.frozen[word] & ~self.copied[word]
            while bits:
                if done == limit:
                    return done
                index = word * 64 + sarp_lowest64(bits)
                self.copy_row(rows + index % PAGE_ROWS, index)
                done += 1
                bits &= bits - 1
        return done

    cdef size_t copy(self, SegmentRow** page, size_t limit) except? 0:
        """Copy up to `limit` more of the frozen rows of these pages. Returns how many are left; 0: done."""
        cdef FrozenRows rows = self.taken
        cdef uint32_t* slot
        cdef size_t word, at
        cdef size_t count
        cdef uint64_t bits
        if rows is None:
            raise InvariantViolationError("no rows are frozen")
        if not self.copying:
            return 0
        slot = rows.slot
        count = rows.count
        with nogil:
            while self.hand < self.frozen_pages:
                at = self.frozen_begin[self.hand]
                if at != self.frozen_begin[self.hand + 1]:
                    limit -= self.copy_page(page[self.hand], self.hand, limit)
                    if limit == 0 and self.copied_count < count:
                        break
                    for word in range(self.hand * PAGE_WORDS, (self.hand + 1) * PAGE_WORDS):
                        self.copied[word] = 0
                        bits = self.frozen[word]
                        while bits:
                            slot[at] = FIRST_SLOT + word * 64 + sarp_lowest64(bits)
                            at += 1
                            bits &= bits - 1
                self.hand += 1
        self.copying = self.hand < self.frozen_pages
        return count - self.copied_count

    cdef FrozenRows take(self):
        if self.taken is None or self.copying:
            raise InvariantViolationError("the frozen rows are not all copied")
        return self.taken

    cdef int release(self) except -1:
        """The snapshot is durable."""
        self.take()
        if self.frozen_pages:
            memset(self.frozen, 0, self.frozen_pages * PAGE_WORDS * sizeof(uint64_t))
        self.copied_count = 0
        self.taken = None
        return 0

    cdef int thaw(self) except -1:
        """The snapshot failed: what it had counts as changed again."""
        cdef size_t page, word
        cdef int more
        if self.taken is None:
            raise InvariantViolationError("no rows are frozen")
        for page in range(self.frozen_pages):
            if self.frozen_begin[page] == self.frozen_begin[page + 1]:
                continue
            more = 0
            for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                more += sarp_popcount64(self.frozen[word] & ~self.changed[word])
                self.changed[word] |= self.frozen[word]
                self.frozen[word] = self.copied[word] = 0
            self.changed_count[page] += more
            self.rows += more
        self.copying = False
        self.copied_count = 0
        self.taken = None
        return 0

    def validate(self):
        """Raise InvariantViolationError for the first violated invariant."""
        cdef size_t page, word
        cdef size_t marks = 0
        cdef size_t frozen = 0
        cdef int in_page
        for page in range(self.page_capacity):
            in_page = 0
            for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                in_page += sarp_popcount64(self.changed[word])
                frozen += sarp_popcount64(self.frozen[word])
            if in_page != self.changed_count[page]:
                raise InvariantViolationError(f"R1: page {page} has {in_page} changed rows, not {self.changed_count[page]}")
            marks += in_page
        if marks != self.rows:
            raise InvariantViolationError(f"R1: {marks} rows are changed, not {self.rows}")
        if frozen != (self.taken.count if self.taken is not None else 0) or self.copied_count > frozen:
            raise InvariantViolationError(f"R2: {frozen} rows are frozen, {self.copied_count} copied")
