# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Routing directory: routing key -> posting list of segment references, sorted by filter (paper §4.1 to §4.4).

Held in memory and never authoritative about block contents: a wrong entry may cost a segment read, never a wrong match.

Two levels. A small mutable *overlay* takes every change; an immutable *base* holds the rest, packed. While the overlay is
merged into a new base it is frozen and a fresh one lies on top, so that the merge runs in small steps between requests.
A level records additions, and removals (the REMOVED mark) of what a lower level holds; the newest record of a posting
decides. The overlay is probed first.

A posting list is a range of each level (see posting_tree). Its first posting may be a *header* (slot < FIRST_SLOT), whose
slot is the state of the routing points behind this one: absent, being built, or published. Entries at a point are reached
only through the published state of the point before it. So entries are built in place yet privately, and publishing them
all is one store (paper §4.2, §4.4: atomically), however long the list.

Invariants (checked by validate()):
  D1  in each level, postings ascend (T1 to T3 of posting_tree);
  D2  a removal in a level has its posting live below; an addition does not;
  D3  registrations and entries are exact: live postings, and keys that have one.
Completeness of entries (the invariant of design §4) is checked where segments can be read: shard.validation.
"""

from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.candidate_filter cimport equal_fields
from sarp_cluster.core.parameters cimport SarpParameters
from sarp_cluster.core.posting_tree cimport (
    FIRST_SLOT,
    NODE_CAPACITY,
    REMOVED,
    Cursor,
    Posting,
    compare_postings,
    cursor_next,
    cursor_posting,
    cursor_previous,
    tree_bytes,
    tree_erase,
    tree_fault,
    tree_find,
    tree_free,
    tree_free_leaves,
    tree_insert,
    tree_new,
    tree_seek,
)

from sarp_cluster.errors import InvariantViolationError


cdef class RoutingDirectory:
    """All routing entries of one index. Owned by one thread."""

    def __cinit__(self, SarpParameters parameters):
        self.parameters = parameters.c
        self.level[0] = tree_new()
        self.levels = 1
        self.merged = NULL

    def __dealloc__(self):
        cdef int i
        for i in range(self.levels):
            tree_free(self.level[i])
        for i in range(self.retired_count):
            tree_free(self.retired[i])
        tree_free(self.merged)

    # --- single postings -------------------------------------------------------------------------------------------

    cdef bint live_below(self, int level, const Posting* posting) noexcept nogil:
        """Is the posting live in the levels older than `level`?"""
        cdef int i
        cdef Cursor found
        for i in range(level + 1, self.levels):
            found = tree_find(self.level[i], posting)
            if found.leaf != NULL:
                return not found.leaf.slot[found.index] & REMOVED
        return False

    cdef bint shadowed(self, int level, const Posting* posting) noexcept nogil:
        """Does a level newer than `level` record the same posting?"""
        cdef int i
        for i in range(level):
            if tree_find(self.level[i], posting).leaf != NULL:
                return True
        return False

    cdef int add(self, const Posting* posting) except -1 nogil:
        """Register a posting. 0 if it was registered already."""
        cdef Cursor found = tree_find(self.level[0], posting)
        cdef bint new_entry
        if found.leaf != NULL and not found.leaf.slot[found.index] & REMOVED:
            return 0
        if found.leaf == NULL and self.live_below(0, posting):
            return 0
        new_entry = self.count_up_to(posting.key, 1) == 0
        if found.leaf != NULL:
            tree_erase(self.level[0], posting)  # the removal; the posting below shows again
        else:
            tree_insert(self.level[0], posting)
        self.registrations += 1
        self.entries += new_entry
        self.version += 1
        return 1

    cdef int discard(self, const Posting* posting) except -1 nogil:
        """Take a posting out. 0 if it was not registered."""
        cdef Cursor found = tree_find(self.level[0], posting)
        cdef Posting removal
        if found.leaf != NULL:
            if found.leaf.slot[found.index] & REMOVED:
                return 0
            tree_erase(self.level[0], posting)
        elif self.live_below(0, posting):
            removal = posting[0]
            removal.slot |= REMOVED
            tree_insert(self.level[0], &removal)
        else:
            return 0
        self.registrations -= 1
        self.version += 1
        if self.count_up_to(posting.key, 1) == 0:
            self.entries -= 1
        return 1

    # --- entries ---------------------------------------------------------------------------------------------------

    cdef bint probe(self, uint64_t key, int* state) noexcept nogil:
        """Is there a live posting under the key? Sets the state of the points behind it."""
        cdef int i
        cdef bint found = False
        cdef bint stated = False
        cdef bint recorded = False  # a newer level has records of this list, which may be removals
        cdef Cursor cursor
        cdef Posting posting
        state[0] = 0
        for i in range(self.levels):
            cursor = tree_seek(self.level[i], key, 0, 0, 0)
            if cursor.leaf == NULL or cursor.leaf.key[cursor.index] != key:
                continue
            if cursor.leaf.slot[cursor.index] < FIRST_SLOT:
                if not stated:
                    state[0] = cursor.leaf.slot[cursor.index]
                    stated = True
                cursor_next(&cursor)
            while not found and cursor.leaf != NULL and cursor.leaf.key[cursor.index] == key:
                if not cursor.leaf.slot[cursor.index] & REMOVED:
                    cursor_posting(cursor, &posting)
                    found = not recorded or not self.shadowed(i, &posting)
                recorded = True
                cursor_next(&cursor)
            if found and stated:
                break
        return found

    cdef int state(self, uint64_t key) noexcept nogil:
        """State of the points behind this entry: two bits each at NEXT, MIDPOINT, LAST_BLOCK."""
        cdef int state
        self.probe(key, &state)
        return state

    cdef int set_state(self, uint64_t key, int state) except -1 nogil:
        cdef Cursor cursor = tree_seek(self.level[0], key, 0, 0, 0)
        cdef Posting header
        self.version += 1
        if cursor.leaf != NULL and cursor.leaf.key[cursor.index] == key and cursor.leaf.slot[cursor.index] < FIRST_SLOT:
            cursor.leaf.slot[cursor.index] = state
            return 0
        header = Posting(key, 0, 0, state)
        tree_insert(self.level[0], &header)
        return 0

    cdef size_t count_up_to(self, uint64_t key, size_t limit) noexcept nogil:
        """Live postings of a list, counted no further than `limit`."""
        cdef size_t count = 0
        cdef int i
        cdef bint removals = False  # only removals shadow what is live below (D2)
        cdef Cursor cursor
        cdef Posting posting
        for i in range(self.levels):
            cursor = tree_seek(self.level[i], key, 0, 0, FIRST_SLOT)
            while count < limit and cursor.leaf != NULL and cursor.leaf.key[cursor.index] == key:
                if cursor.leaf.slot[cursor.index] & REMOVED:
                    removals = True
                elif removals and i > 0:
                    cursor_posting(cursor, &posting)
                    count += not self.shadowed(i, &posting)
                else:
                    count += 1
                cursor_next(&cursor)
        return count

    cdef size_t slots_after(self, const Posting* after, Posting* out, size_t limit) noexcept nogil:
        """Up to `limit` live postings of the list of `after.key` that follow `after`, in order.

        `after.slot` below FIRST_SLOT means the list's beginning.
        """
        cdef size_t count = 0
        cdef int i
        cdef Cursor cursor[LEVELS_MAX]
        cdef Posting least, posting
        cdef int chosen
        for i in range(self.levels):
            cursor[i] = tree_seek(
                self.level[i], after.key, after.high, after.low, FIRST_SLOT if after.slot < FIRST_SLOT else after.slot + 1
            )
        while count < limit:
            chosen = -1
            for i in range(self.levels):
                if cursor[i].leaf == NULL or cursor[i].leaf.key[cursor[i].index] != after.key:
                    continue
                cursor_posting(cursor[i], &posting)
                if chosen < 0 or compare_postings(posting.key, posting.high, posting.low, posting.slot,
                                                  least.key, least.high, least.low, least.slot) < 0:
                    least = posting
                    chosen = i
            if chosen < 0:
                break
            # Older records of the same posting lose against the newest.
            for i in range(self.levels):
                if i != chosen and cursor[i].leaf != NULL and compare_postings(
                    cursor[i].leaf.key[cursor[i].index], cursor[i].leaf.high[cursor[i].index],
                    cursor[i].leaf.low[cursor[i].index], cursor[i].leaf.slot[cursor[i].index],
                    least.key, least.high, least.low, least.slot,
                ) == 0:
                    cursor_next(&cursor[i])
            cursor_next(&cursor[chosen])
            if least.slot >= FIRST_SLOT and not least.slot & REMOVED:
                out[count] = least
                count += 1
        return count

    # --- candidates in the order of their match potential ------------------------------------------------------------

    cdef void walk_begin(self, CandidateWalk* walk, uint64_t key, uint64_t high, uint64_t low) noexcept nogil:
        """Start at the query's place in the sorted list.

        DEVIATION from Algorithm 1: the candidate with the most leading fields equal is a neighbour of the query's place
        in the sorted list, so one descent and a walk outwards replaces a binary search over match lengths with a
        descent each. tests/property/test_routing_directory.py holds the two equal.
        """
        cdef int i
        cdef Cursor cursor
        walk.levels = self.levels
        walk.key = key
        walk.high = high
        walk.low = low
        for i in range(self.levels):
            cursor = tree_seek(self.level[i], key, high, low, FIRST_SLOT)
            walk.right[i] = cursor
            walk.right_equal[i] = self.equal_at(walk, cursor)
            if cursor.leaf == NULL:
                cursor.leaf = self.level[i].last
                cursor.index = cursor.leaf.count
            cursor_previous(&cursor)
            walk.left[i] = cursor
            walk.left_equal[i] = self.equal_at(walk, cursor)

    cdef int equal_at(self, const CandidateWalk* walk, Cursor cursor) noexcept nogil:
        if cursor.leaf == NULL or cursor.leaf.key[cursor.index] != walk.key or cursor.leaf.slot[cursor.index] < FIRST_SLOT:
            return -1
        return equal_fields(
            &self.parameters, cursor.leaf.high[cursor.index], cursor.leaf.low[cursor.index], walk.high, walk.low
        )

    cdef int walk_next(self, CandidateWalk* walk, uint32_t* slot) noexcept nogil:
        """The next best candidate: sets `slot`, returns its count of equal leading fields; -1 at the end."""
        cdef int i, best, best_level
        cdef bint from_left
        cdef Posting posting
        while True:
            best = -1
            best_level = 0
            from_left = False
            for i in range(walk.levels):
                if walk.right_equal[i] > best:
                    best = walk.right_equal[i]
                    best_level = i
                    from_left = False
                if walk.left_equal[i] > best:
                    best = walk.left_equal[i]
                    best_level = i
                    from_left = True
            if best < 0:
                return -1
            if from_left:
                cursor_posting(walk.left[best_level], &posting)
                cursor_previous(&walk.left[best_level])
                walk.left_equal[best_level] = self.equal_at(walk, walk.left[best_level])
            else:
                cursor_posting(walk.right[best_level], &posting)
                cursor_next(&walk.right[best_level])
                walk.right_equal[best_level] = self.equal_at(walk, walk.right[best_level])
            if posting.slot & REMOVED or (best_level > 0 and self.shadowed(best_level, &posting)):
                continue
            slot[0] = posting.slot
            return best

    # --- merging the overlay into a new base -------------------------------------------------------------------------

    @property
    def overlay_postings(self):
        """Records in the overlay."""
        return self.level[0].postings

    @property
    def base_postings(self):
        """Records in the base."""
        return self.level[self.levels - 1].postings if self.levels > 1 else 0

    @property
    def merging(self):
        """True while the overlay is being merged, or what the last merge replaced is being freed."""
        return self.merged != NULL or self.retired_count > 0

    @property
    def resident_bytes(self):
        """Bytes of all levels."""
        cdef size_t total = 0 if self.merged == NULL else tree_bytes(self.merged)
        cdef int i
        for i in range(self.retired_count):
            total += tree_bytes(self.retired[i])
        for i in range(self.levels):
            total += tree_bytes(self.level[i])
        return total

    def begin_merge(self):
        """Freeze the overlay and lay a fresh one on top."""
        cdef int i
        if self.merging:
            return
        fresh = tree_new()
        self.merged = tree_new()
        for i in range(self.levels, 0, -1):
            self.level[i] = self.level[i - 1]
        self.level[0] = fresh
        self.levels += 1
        self.version += 1  # walks in progress number their levels
        self.merge_newer = Cursor(self.level[1].first, -1)
        cursor_next(&self.merge_newer)
        self.merge_older = Cursor(NULL, 0)
        if self.levels == 3:
            self.merge_older = Cursor(self.level[2].first, -1)
            cursor_next(&self.merge_older)

    def merge_step(self, size_t limit):
        """Move up to `limit` records into the new base, make it the base, free what it replaced. False when all is done."""
        cdef size_t moved = 0
        cdef Posting newer, older
        cdef int order
        cdef bint ended = False
        if self.merged == NULL:
            if self.retired_count and not tree_free_leaves(
                self.retired[self.retired_count - 1], max(<size_t>1, limit // NODE_CAPACITY)
            ):
                self.retired_count -= 1
                tree_free(self.retired[self.retired_count])
            return self.retired_count > 0
        with nogil:
            while moved < limit:
                moved += 1
                if self.merge_newer.leaf == NULL and self.merge_older.leaf == NULL:
                    ended = True
                    break
                if self.merge_newer.leaf == NULL:
                    order = 1
                elif self.merge_older.leaf == NULL:
                    order = -1
                else:
                    cursor_posting(self.merge_newer, &newer)
                    cursor_posting(self.merge_older, &older)
                    if newer.key == older.key and newer.slot < FIRST_SLOT and older.slot < FIRST_SLOT:
                        order = 0  # two headers of one list: the newer state holds
                    else:
                        order = compare_postings(newer.key, newer.high, newer.low, newer.slot,
                                                 older.key, older.high, older.low, older.slot)
                if order > 0:
                    cursor_posting(self.merge_older, &older)
                    tree_insert(self.merged, &older)
                    cursor_next(&self.merge_older)
                    continue
                cursor_posting(self.merge_newer, &newer)
                cursor_next(&self.merge_newer)
                if order == 0:
                    cursor_next(&self.merge_older)
                if not newer.slot & REMOVED:
                    tree_insert(self.merged, &newer)
        if ended:
            self.finish_merge()
        return True

    cdef void finish_merge(self) noexcept:
        cdef int i
        for i in range(1, self.levels):
            self.retired[self.retired_count] = self.level[i]
            self.retired_count += 1
        self.level[1] = self.merged
        self.levels = 2
        self.merged = NULL
        self.version += 1

    # --- checks ------------------------------------------------------------------------------------------------------

    def postings(self):
        """All live postings and headers as (key, high, low, slot), in order; for checks and tests."""
        cdef int i
        cdef Cursor cursor
        cdef Posting posting
        found = {}
        for i in range(self.levels - 1, -1, -1):
            cursor = Cursor(self.level[i].first, -1)
            cursor_next(&cursor)
            while cursor.leaf != NULL:
                cursor_posting(cursor, &posting)
                if posting.slot < FIRST_SLOT:
                    found[(posting.key, 0, 0, 0)] = (posting.key, 0, 0, posting.slot)
                elif posting.slot & REMOVED:
                    found.pop((posting.key, posting.high, posting.low, posting.slot & ~(<uint32_t>REMOVED)), None)
                else:
                    record = (posting.key, posting.high, posting.low, posting.slot)
                    found[record] = record
                cursor_next(&cursor)
        return sorted(found.values())

    def validate(self):
        """Raise InvariantViolationError for the first violated invariant."""
        cdef int i
        cdef Cursor cursor
        cdef Posting posting
        for i in range(self.levels):
            fault = tree_fault(self.level[i])
            if fault is not None:
                raise InvariantViolationError(f"D1 in level {i}: {fault}")
            cursor = Cursor(self.level[i].first, -1)
            cursor_next(&cursor)
            while cursor.leaf != NULL:
                cursor_posting(cursor, &posting)
                if posting.slot >= FIRST_SLOT and bool(posting.slot & REMOVED) != self.live_below(i, &posting):
                    raise InvariantViolationError(f"D2 in level {i}: key {posting.key:#x}, slot {posting.slot:#x}")
                cursor_next(&cursor)
        live = [record for record in self.postings() if record[3] >= FIRST_SLOT]
        keys = {record[0] for record in live}
        if len(live) != self.registrations or len(keys) != self.entries:
            raise InvariantViolationError(
                f"D3: {len(live)} registrations under {len(keys)} keys, counted {self.registrations} under {self.entries}"
            )

    # --- for tests and tools -----------------------------------------------------------------------------------------

    def add_posting(self, uint64_t key, uint64_t high, uint64_t low, uint32_t slot):
        """Register one posting; True if it is new."""
        cdef Posting posting = Posting(key, high, low, slot)
        return self.add(&posting) == 1

    def discard_posting(self, uint64_t key, uint64_t high, uint64_t low, uint32_t slot):
        """Take one posting out; True if it was there."""
        cdef Posting posting = Posting(key, high, low, slot)
        return self.discard(&posting) == 1

    def count(self, uint64_t key, size_t limit=<size_t>-1):
        """Live postings under a key, counted no further than `limit`."""
        return self.count_up_to(key, limit)

    def candidates(self, uint64_t key, uint64_t high, uint64_t low):
        """(slot, equal leading fields) of a list in the order in which a match would examine it."""
        cdef CandidateWalk walk
        cdef uint32_t slot
        cdef int equal
        self.walk_begin(&walk, key, high, low)
        found = []
        while True:
            equal = self.walk_next(&walk, &slot)
            if equal < 0:
                return found
            found.append((slot, equal))
