# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Segment table: slot -> where a segment's records stand, and how segments hang together (design §5).

Rows are 40 bytes in pages of 1,024, so that growing never moves a row and has no long stop. Slots below FIRST_SLOT are not
used (see posting_tree). A slot that was freed is used again under a new tag: a stale reference (slot, tag) is recognised.

Invariants (checked by validate()):
  S1  a parent lies one window before its child, is of the same namespace and is full;
  S2  an origin lies in the same window and namespace, and covers the block before the fork by its own blocks
      (origin.fork < fork <= origin.count); fork is 0 exactly where there is no origin;
  S3  children counts the segments that name this one as parent or origin;
  S4  segments, blocks (each at its home), block entries (copies too) and deltas are exact.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

from sarp_cluster.core.segment cimport SegmentColumns

from sarp_cluster import limits
from sarp_cluster.errors import CorruptRecordError, InvariantViolationError, TooLargeError

cdef uint32_t SLOT_MAX = limits.SEGMENTS_MAX
cdef uint32_t SLOTS_AHEAD_MAX = limits.REQUEST_BLOCKS_MAX


cdef class SegmentTable:
    """All segments of one index. Owned by one thread."""

    def __cinit__(self):
        self.next_slot = FIRST_SLOT

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.pages):
            free(self.page[i])
        free(self.page)
        free(self.free_slot)

    cdef uint32_t allocate(self) except 0:
        """A free slot, its row cleared but for the tag, which is new."""
        cdef uint32_t slot
        if self.free_count:
            self.free_count -= 1
            slot = self.free_slot[self.free_count]
            self.row(slot).tag += 1
            return slot
        slot = self.next_slot
        if slot > SLOT_MAX:
            raise TooLargeError(f"the index holds its limit of {limits.SEGMENTS_MAX} segments", field="block_ids")
        if (slot - FIRST_SLOT) // PAGE_ROWS == self.pages:
            self.add_page()
        self.next_slot += 1
        return slot

    cdef int add_page(self) except -1:
        cdef SegmentRow** page
        cdef size_t capacity
        if self.pages == self.page_capacity:
            capacity = max(64, self.page_capacity * 2)
            page = <SegmentRow**>realloc(self.page, capacity * sizeof(SegmentRow*))
            if page == NULL:
                raise MemoryError("segment table")
            self.page = page
            self.page_capacity = capacity
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

    cdef void store(self, const SegmentColumns* columns) noexcept nogil:
        """Enter a new segment or a new state of one, with where its records stand."""
        cdef SegmentRow* row = self.row(columns.slot)
        if row.count == 0:
            self.segments += 1
            self.blocks += columns.count - columns.fork
            self.block_entries += columns.count
            row.children = 0
            if columns.parent:
                self.row(columns.parent).children += 1
            if columns.origin:
                self.row(columns.origin).children += 1
        else:
            self.blocks += columns.count - row.count
            self.block_entries += columns.count - row.count
            self.deltas -= row.delta != 0
        self.deltas += columns.delta != 0
        self.version += 1
        row.image = columns.image
        row.delta = columns.delta
        row.parent = columns.parent
        row.origin = columns.origin
        row.namespace_id = columns.namespace_id
        row.window = columns.window
        row.tag = columns.tag
        row.fork = columns.fork
        row.count = columns.count

    cdef int remove(self, uint32_t slot) except -1:
        """Take out a segment that has no children."""
        cdef SegmentRow* row = self.row(slot)
        if row.count == 0 or row.children:
            raise InvariantViolationError(f"segment {slot} is free or has {row.children} children")
        self.segments -= 1
        self.blocks -= row.count - row.fork
        self.block_entries -= row.count
        self.deltas -= row.delta != 0
        self.version += 1
        if row.parent:
            self.row(row.parent).children -= 1
        if row.origin:
            self.row(row.origin).children -= 1
        row.count = 0
        self.release(slot)
        return 0

    # --- recovery ------------------------------------------------------------------------------------------------------

    cdef bint restore(self, const SegmentColumns* columns) except -1:
        """Enter a segment as its record in the log has it; counters and free slots follow with finish_restore.

        False for a slot that no insert can have taken: they are taken one after the other.
        """
        cdef SegmentRow* row
        if columns.slot < FIRST_SLOT or columns.slot > SLOT_MAX or columns.slot > self.next_slot + SLOTS_AHEAD_MAX:
            return False
        while (columns.slot - FIRST_SLOT) // PAGE_ROWS >= self.pages:
            self.add_page()
        self.next_slot = max(self.next_slot, columns.slot + 1)
        row = self.row(columns.slot)
        row.image = columns.image
        row.delta = columns.delta
        row.parent = columns.parent
        row.origin = columns.origin
        row.namespace_id = columns.namespace_id
        row.window = columns.window
        row.tag = columns.tag
        row.fork = columns.fork
        row.count = columns.count
        return True

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

    @property
    def slots_end(self):
        """One past the highest slot in use."""
        return self.next_slot

    @property
    def resident_bytes(self):
        """Bytes of rows, page list and free list."""
        return (
            self.pages * PAGE_ROWS * sizeof(SegmentRow)
            + self.page_capacity * sizeof(SegmentRow*)
            + self.free_capacity * sizeof(uint32_t)
        )

    def slots_in_use(self, size_t limit):
        """The slots of all segments, in order, in lists of up to `limit`."""
        cdef uint32_t slot = FIRST_SLOT
        while slot < self.next_slot:
            found = []
            while slot < self.next_slot and len(found) < limit:
                if self.row(slot).count:
                    found.append(slot)
                slot += 1
            if found:
                yield found

    def slots_with_delta(self, uint32_t begin, uint32_t rows, int limit):
        """Up to `limit` slots whose segment has a delta, among `rows` rows from `begin` on, and the slot to go on from."""
        cdef uint32_t slot = max(begin, <uint32_t>FIRST_SLOT)
        cdef uint32_t end = min(<uint64_t>slot + rows, self.next_slot)
        found = []
        while slot < end and len(found) < limit:
            if self.row(slot).delta and self.row(slot).count:
                found.append(slot)
            slot += 1
        return found, slot if slot < self.next_slot else 0

    def describe(self, uint32_t slot):
        """A row as a dictionary, or None where the slot is free; for checks, tools and tests."""
        cdef SegmentRow* row
        if slot < FIRST_SLOT or slot >= self.next_slot:
            return None
        row = self.row(slot)
        if row.count == 0:
            return None
        return {
            "slot": slot, "tag": row.tag, "window": row.window, "namespace": row.namespace_id, "parent": row.parent,
            "origin": row.origin, "children": row.children, "fork": row.fork, "count": row.count, "image": row.image,
            "delta": row.delta,
        }

    def validate(self, int segment_blocks):
        """Raise InvariantViolationError for the first violated invariant."""
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
