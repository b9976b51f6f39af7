# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Routing directory: routing key -> posting list of segment references, sorted by filter (paper §4.1 to §4.4).

Held in memory and never authoritative about block contents: a wrong entry may cost a segment read, never a wrong match.

It is kept in levels (directory_levels): an overlay that takes every change, over immutable runs that need not be in memory.

Each change is *journaled* for the log: a recovered index lays the changes since its newest snapshot into its overlay without
looking at the runs.

A posting list is a range of each level (see posting_tree). It may begin with *headers* (slot < FIRST_SLOT), one a routing
point: the point, and the state of the points behind it (absent, being built, published). Entries at a point are reached only
through the published state of the point before it. So entries are built in place yet privately, and publishing them all is
one store (paper §4.2, §4.4: atomically), however long the list. (A key stands for one point but where keys collide; a header
names its point so that colliding lists do not take one another's state.)

Invariants (checked by validate(), after D1 and D2 of directory_levels):
  D3  registrations and entries are exact: live postings, and keys that have one.
Completeness of entries (the invariant of design §4) is checked where segments can be read: shard.validation.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from sarp_cluster.core.candidate_filter cimport equal_fields
from sarp_cluster.core.directory_levels cimport LEVELS_MAX, DirectoryLevels
from sarp_cluster.core.parameters cimport SarpParameters
from sarp_cluster.core.posting_run cimport level_begin, level_last, level_seek
from sarp_cluster.core.posting_tree cimport (
    FIRST_SLOT,
    REMOVED,
    Cursor,
    Posting,
    compare_postings,
    cursor_next,
    cursor_posting,
    cursor_previous,
    tree_erase,
    tree_find,
    tree_insert,
    tree_seek,
)
from sarp_cluster.core.routing_journal cimport SortedJournal, pack_journal
from sarp_cluster.core.run_merge cimport merged_next

from sarp_cluster.errors import InvariantViolationError


cdef class RoutingDirectory(DirectoryLevels):
    """All routing entries of one index. Owned by one thread."""

    def __cinit__(self, SarpParameters parameters):
        self.parameters = parameters.c
        self.building = set()

    def __dealloc__(self):
        free(self.journal)

    # --- single postings -------------------------------------------------------------------------------------------

    cdef int add(self, const Posting* posting) except -1 nogil:
        """Register a posting. 0 if it was registered already."""
        cdef Cursor found = tree_find(self.level[0].tree, posting)
        cdef bint new_entry
        cdef bint below
        if found.leaf != NULL and not found.leaf.slot[found.index] & REMOVED:
            return 0
        below = self.live_below(0, posting)
        if found.leaf == NULL and below:
            return 0
        new_entry = self.count_up_to(posting.key, 1) == 0
        if found.leaf != NULL and below:
            tree_erase(self.level[0].tree, posting)  # the removal; the posting below shows again
        else:
            tree_insert(self.level[0].tree, posting)
        self.note(posting, 1, new_entry)
        return 1

    cdef int discard(self, const Posting* posting) except -1 nogil:
        """Take a posting out. 0 if it was not registered."""
        cdef Cursor found = tree_find(self.level[0].tree, posting)
        cdef Posting removal = posting[0]
        removal.slot |= REMOVED
        if found.leaf != NULL and found.leaf.slot[found.index] & REMOVED:
            return 0
        if self.live_below(0, posting):
            tree_insert(self.level[0].tree, &removal)
        elif found.leaf != NULL:
            tree_erase(self.level[0].tree, posting)
        else:
            return 0
        self.note(&removal, -1, -<int>(self.count_up_to(posting.key, 1) == 0))
        return 1

    cdef void touch(self, const Posting* posting) noexcept nogil:
        """Look where a change of this posting will look, so that chunks which are not in memory are noted first."""
        cdef int i
        for i in range(1, self.levels):
            level_seek(&self.level[i], posting.key, posting.high, posting.low, posting.slot)

    # --- the journal -------------------------------------------------------------------------------------------------

    cdef int note(self, const Posting* posting, int registrations, int entries) except -1 nogil:
        """Count a change, and journal it."""
        cdef void* memory
        cdef size_t capacity
        self.registrations += registrations
        self.entries += entries
        self.version += 1
        if not self.journaling:
            return 0
        if self.journal_count == self.journal_capacity:
            capacity = max(<size_t>256, 2 * self.journal_capacity)
            memory = realloc(self.journal, capacity * sizeof(Posting))
            if memory == NULL:
                with gil:
                    raise MemoryError("routing journal")
            self.journal = <Posting*>memory
            self.journal_capacity = capacity
        self.journal[self.journal_count] = posting[0]
        self.journal_count += 1
        self.journal_registrations += registrations
        self.journal_entries += entries
        return 0

    def take_journal(self):
        """The changes since the last call, as payloads of ROUTING records; what `apply_journal` takes."""
        payloads = pack_journal(self.journal, self.journal_count, self.journal_registrations, self.journal_entries)
        self.journal_count = 0
        self.journal_registrations = 0
        self.journal_entries = 0
        return payloads

    def apply_journal(self, list payloads):
        """Lay journaled changes into the overlay without looking at older levels.

        Raises ValueError for a payload that makes no sense; then nothing is applied.
        """
        cdef SortedJournal journal = SortedJournal(payloads)
        cdef size_t i
        for i in range(journal.count):
            if journal.posting[i].slot < FIRST_SLOT:
                self.put_header(&journal.posting[i])
                self.note_building(&journal.posting[i])
            else:
                tree_insert(self.level[0].tree, &journal.posting[i])
        self.registrations += journal.registrations
        self.entries += journal.entries
        self.version += 1

    # --- entries ---------------------------------------------------------------------------------------------------

    cdef bint probe(self, uint64_t key, int point, int* state) noexcept nogil:
        """Is there a live posting under the key? Sets the state of the points behind `point`."""
        cdef int i
        cdef bint found = False
        cdef bint stated = False
        cdef int listed = 0  # bits of the newer levels that have records of this list, which may be removals
        cdef Cursor cursor
        cdef Posting posting
        state[0] = 0
        for i in range(self.levels):
            cursor = level_seek(&self.level[i], key, 0, 0, <uint32_t>point << STATE_BITS)
            while cursor.leaf != NULL and cursor.leaf.key[cursor.index] == key and (
                cursor.leaf.slot[cursor.index] < FIRST_SLOT
            ):
                if not stated and cursor.leaf.slot[cursor.index] >> STATE_BITS == <uint32_t>point:
                    state[0] = cursor.leaf.slot[cursor.index] & ((1 << STATE_BITS) - 1)
                    stated = True
                cursor_next(&cursor)
            while not found and cursor.leaf != NULL and cursor.leaf.key[cursor.index] == key:
                if not cursor.leaf.slot[cursor.index] & REMOVED:
                    cursor_posting(cursor, &posting)
                    found = not listed or not self.shadowed(i, listed, &posting)
                listed |= 1 << i
                cursor_next(&cursor)
            if found and stated:
                break
        return found

    cdef int state(self, uint64_t key, int point) noexcept nogil:
        """State of the points behind this one: two bits each at NEXT, MIDPOINT, LAST_BLOCK."""
        cdef int state
        self.probe(key, point, &state)
        return state

    cdef int set_state(self, uint64_t key, int point, int state) except -1:
        """Change the state of the points behind this one."""
        cdef Posting header = Posting(key, 0, 0, <uint32_t>point << STATE_BITS | <uint32_t>state)
        self.put_header(&header)
        self.note_building(&header)
        return self.note(&header, 0, 0)

    cdef int put_header(self, const Posting* header) except -1 nogil:
        cdef uint32_t slot = header.slot & ~<uint32_t>((1 << STATE_BITS) - 1)
        cdef Cursor cursor = tree_seek(self.level[0].tree, header.key, 0, 0, slot)
        if cursor.leaf != NULL and cursor.leaf.key[cursor.index] == header.key and (
            slot <= cursor.leaf.slot[cursor.index] < slot + (1 << STATE_BITS)
        ):
            cursor.leaf.slot[cursor.index] = header.slot
            return 0
        tree_insert(self.level[0].tree, header)
        return 0

    cdef int note_building(self, const Posting* header) except -1:
        """Keep account of which points are being built, so that a restart finds their back-fills again."""
        cdef int kind
        for kind in (NEXT, MIDPOINT, LAST_BLOCK):
            if (header.slot >> kind) & 3 == BUILDING:
                self.building.add((header.key, header.slot >> STATE_BITS, kind))
            elif self.building:
                self.building.discard((header.key, header.slot >> STATE_BITS, kind))
        return 0

    cdef size_t count_up_to(self, uint64_t key, size_t limit) noexcept nogil:
        """Live postings of a list, counted no further than `limit`."""
        cdef size_t count = 0
        cdef int i
        cdef int listed = 0
        cdef Cursor cursor[LEVELS_MAX]
        cdef Posting posting
        for i in range(self.levels):
            cursor[listed] = level_seek(&self.level[i], key, 0, 0, FIRST_SLOT)
            if cursor[listed].leaf != NULL and cursor[listed].leaf.key[cursor[listed].index] == key:
                listed += 1
        if listed == 1:  # nothing shadows anything
            while count < limit and cursor[0].leaf != NULL and cursor[0].leaf.key[cursor[0].index] == key:
                count += not cursor[0].leaf.slot[cursor[0].index] & REMOVED
                cursor_next(&cursor[0])
            return count
        while count < limit and merged_next(cursor, listed, &posting) and posting.key == key:
            count += not posting.slot & REMOVED
        return count

    cdef size_t slots_after(self, const Posting* after, Posting* out, size_t limit) noexcept nogil:
        """Up to `limit` live postings of the list of `after.key` that follow `after`, in order.

        `after.slot` below FIRST_SLOT means the list's beginning.
        """
        cdef size_t count = 0
        cdef int i
        cdef Cursor cursor[LEVELS_MAX]
        cdef Posting posting
        for i in range(self.levels):
            cursor[i] = level_seek(
                &self.level[i], after.key, after.high, after.low,
                FIRST_SLOT if after.slot < FIRST_SLOT else after.slot + 1,
            )
        while count < limit and merged_next(cursor, self.levels, &posting) and posting.key == after.key:
            if posting.slot >= FIRST_SLOT and not posting.slot & REMOVED:
                out[count] = posting
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
        walk.listed = 0
        for i in range(self.levels):
            cursor = level_seek(&self.level[i], key, high, low, FIRST_SLOT)
            walk.right[i] = cursor
            walk.right_equal[i] = self.equal_at(walk, cursor)
            if cursor.leaf == NULL:
                cursor.leaf = level_last(&self.level[i])
                if cursor.leaf != NULL:
                    cursor.index = cursor.leaf.count
            if cursor.leaf != NULL:
                cursor_previous(&cursor)
            walk.left[i] = cursor
            walk.left_equal[i] = self.equal_at(walk, cursor)
            walk.listed |= (walk.left_equal[i] >= 0 or walk.right_equal[i] >= 0) << i

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
            if posting.slot & REMOVED or self.shadowed(best_level, walk.listed, &posting):
                continue
            slot[0] = posting.slot
            return best

    def restore_counts(self, size_t registrations, size_t entries, building):
        """What a snapshot says about the runs that were attached."""
        self.registrations = registrations
        self.entries = entries
        self.building.update(building)

    @property
    def resident_bytes(self):
        """Bytes of all levels and of the journal."""
        return self.level_bytes() + self.journal_capacity * sizeof(Posting)

    # --- checks ------------------------------------------------------------------------------------------------------

    def postings(self):
        """All live postings and headers as (key, high, low, slot), in order; for checks and tests."""
        cdef int i
        cdef Cursor cursor
        cdef Posting posting
        found = {}
        for i in range(self.levels - 1, -1, -1):
            cursor = level_begin(&self.level[i])
            while cursor.leaf != NULL:
                cursor_posting(cursor, &posting)
                if posting.slot < FIRST_SLOT:
                    found[(posting.key, 0, 0, posting.slot >> STATE_BITS)] = (posting.key, 0, 0, posting.slot)
                elif posting.slot & REMOVED:
                    found.pop((posting.key, posting.high, posting.low, posting.slot & ~(<uint32_t>REMOVED)), None)
                else:
                    record = (posting.key, posting.high, posting.low, posting.slot)
                    found[record] = record
                cursor_next(&cursor)
        return sorted(found.values())

    def validate(self):
        """Raise InvariantViolationError for the first violated invariant. All chunks have to be in memory."""
        self.validate_levels()
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
