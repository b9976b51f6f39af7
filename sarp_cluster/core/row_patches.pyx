# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What the log behind a snapshot did to rows of the segment table that are not loaded.

Replay does not touch such a row: it notes what happened as a *patch*, and the patches of a page are applied, in order, when
the page is loaded. All patches stand one behind the other in one array of words; those of a page form a list in it. A patch
says what its row must have been before, so a log that does not fit the snapshot is found, at the latest here.

A patch that gives a row other records leaves those it had without a row: their places are collected for whoever counts the
bytes of the log that are alive.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

from sarp_cluster.core.changed_rows cimport ChangedRows
from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment_row cimport PAGE_ROWS, SegmentRow, fits

from sarp_cluster.errors import CorruptRecordError


cdef class RowPatches:
    """The patches of one segment table. Rows are numbered from 0 on."""

    def __dealloc__(self):
        free(self.first)
        free(self.last)
        free(self.word)
        free(self.replaced)

    cdef int begin(self, size_t pages) except -1:
        """Take patches for so many pages."""
        self.first = <uint32_t*>calloc(max(pages, <size_t>1), sizeof(uint32_t))
        self.last = <uint32_t*>calloc(max(pages, <size_t>1), sizeof(uint32_t))
        if self.first == NULL or self.last == NULL:
            raise MemoryError("segment table")
        self.pages = pages
        return 0

    cdef size_t bytes(self) noexcept:
        return self.pages * 2 * sizeof(uint32_t) + (self.capacity + self.replaced_capacity) * sizeof(uint64_t)

    cdef int reserve(self, size_t words) except -1:
        """Make room for patches of so many words, headers included."""
        cdef size_t capacity
        cdef uint64_t* word
        if self.words + words <= self.capacity:
            return 0
        capacity = max(4_096, self.capacity * 2)
        if capacity > 0xFFFFFFFFu:
            raise MemoryError("segment table: the log behind the snapshot is too long")
        word = <uint64_t*>realloc(self.word, capacity * sizeof(uint64_t))
        if word == NULL:
            raise MemoryError("segment table")
        self.word = word
        self.capacity = capacity
        self.words = max(self.words, <size_t>1)
        return 0

    cdef void* add(self, uint32_t index, int kind, int count_before, bint had_delta, size_t words) noexcept:
        """Append a patch, room for which is reserved. Returns where what follows its header is to be put."""
        cdef size_t page = index // PAGE_ROWS
        cdef uint32_t at = self.words
        (<PatchHeader*>&self.word[at])[0] = PatchHeader(0, index % PAGE_ROWS, kind, count_before | had_delta << 7)
        if self.last[page]:
            (<PatchHeader*>&self.word[self.last[page]]).next = at
        else:
            self.first[page] = at
            self.patched_pages += 1
        self.last[page] = at
        self.words += words
        return &self.word[at + HEADER_WORDS]

    cdef int apply(self, size_t page, SegmentRow* rows) except -1:
        """Do to a page's rows what the log did. Raises CorruptRecordError where that does not fit them."""
        cdef size_t replaced_count = self.replaced_count
        cdef uint32_t at = self.first[page]
        cdef PatchHeader* header
        cdef SegmentRow* row
        cdef SegmentRow* whole
        cdef DeltaPatch* delta
        cdef uint32_t children
        cdef int before
        cdef bint had_delta, sound
        while at:
            header = <PatchHeader*>&self.word[at]
            row = &rows[header.row]
            before = header.before & 0x7F
            had_delta = header.before >> 7
            if header.kind == ROW:
                whole = <SegmentRow*>&self.word[at + HEADER_WORDS]
                sound = fits(row, whole.tag, before, had_delta)
                if sound:
                    children = row.children if before else 0
                    whole.stale = before and (row.stale or whole.count < before)
                    if before:
                        self.note_replaced(row.image)
                        self.note_replaced(row.delta)
                    row[0] = whole[0]
                    row.children = children
            elif header.kind == DELTA:
                delta = <DeltaPatch*>&self.word[at + HEADER_WORDS]
                sound = fits(row, delta.tag, before, had_delta)
                if sound:
                    self.note_replaced(row.delta)
                    row.delta = delta.place
                    row.count = delta.count
            elif header.kind == FREE or header.kind == DROP:
                sound = fits(row, row.tag, before, had_delta) and row.children == 0
                if sound:
                    self.note_replaced(row.image)
                    self.note_replaced(row.delta)
                    row.count = 0
                    row.stale = header.kind == DROP
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

    cdef void forget(self, size_t page, ChangedRows changes, const SegmentRow* rows) noexcept:
        """A page's patches are applied: its rows changed since the snapshot that the page is from."""
        cdef uint32_t at = self.first[page]
        cdef PatchHeader* header
        if at == 0:
            return
        while at:
            header = <PatchHeader*>&self.word[at]
            changes.touch(&rows[header.row], page * PAGE_ROWS + header.row)
            at = header.next
        self.first[page] = self.last[page] = 0
        self.patched_pages -= 1

    cdef void free_applied(self) noexcept:
        """Give back the memory of the patches once all are applied."""
        if self.patched_pages == 0:
            free(self.word)
            self.word = NULL
            self.words = self.capacity = 0

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

    cdef object take_replaced(self):
        """The places (u64) that were noted since the last call."""
        places = memoryview(bytes((<const uint8_t*>self.replaced)[: self.replaced_count * sizeof(uint64_t)])).cast("Q")
        free(self.replaced)
        self.replaced = NULL
        self.replaced_count = self.replaced_capacity = 0
        return places
