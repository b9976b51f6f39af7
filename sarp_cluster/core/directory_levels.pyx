# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The levels of a routing directory, and how they come and go (design §5).

Levels, newest first. A small mutable *overlay* takes every change. A snapshot *freezes* it, lays a fresh one on top and
writes the frozen one out as an immutable *run*; the oldest run is the *base*. Neighbouring runs are merged in the background
(run_merge). A level records additions, and removals (the REMOVED mark) of what older levels hold; the newest record of a
posting decides. Runs need not be in memory: a question that needs a chunk which is not is answered with what is there, and
the chunk noted in `missed`; who asks has to look there, have the chunks loaded, and ask again.

Invariants (checked by validate_levels()):
  D1  in each level, postings ascend (T1 to T3 of posting_tree, R1 to R3 of posting_run);
  D2  the oldest level has no removals, unless it is the overlay;
"""

from libc.stdint cimport uint32_t
from libc.string cimport memset

from sarp_cluster.core.posting_run cimport Level, PostingRun, level_begin, level_seek
from sarp_cluster.core.posting_tree cimport (
    REMOVED,
    Cursor,
    Posting,
    Tree,
    compare_postings,
    cursor_next,
    tree_bytes,
    tree_fault,
    tree_free,
    tree_new,
)
from sarp_cluster.core.run_merge cimport RunMerge

from sarp_cluster.errors import InvariantViolationError


cdef class RetiredTree:
    """A frozen overlay that a run has replaced; freed with this object, which may die in a helper thread."""
    cdef Tree* tree

    def __dealloc__(self):
        with nogil:
            tree_free(self.tree)


cdef class DirectoryLevels:
    """The levels. Owned by one thread; a merge may read the immutable ones in another."""

    def __cinit__(self):
        memset(self.level, 0, sizeof(self.level))
        self.level[0].tree = tree_new()
        self.levels = 1
        self.run = [None]
        self.missing.count = 0

    def __dealloc__(self):
        cdef int i
        for i in range(self.levels):
            tree_free(self.level[i].tree)

    # --- asking ------------------------------------------------------------------------------------------------------

    cdef bint live_below(self, int level, const Posting* posting) noexcept nogil:
        """Is the posting live in the levels older than `level`?"""
        cdef int i
        cdef Cursor found
        for i in range(level + 1, self.levels):
            found = level_seek(&self.level[i], posting.key, posting.high, posting.low, posting.slot)
            if found.leaf != NULL and compare_postings(
                found.leaf.key[found.index], found.leaf.high[found.index], found.leaf.low[found.index],
                found.leaf.slot[found.index], posting.key, posting.high, posting.low, posting.slot,
            ) == 0:
                return not found.leaf.slot[found.index] & REMOVED
        return False

    cdef bint shadowed(self, int level, int listed, const Posting* posting) noexcept nogil:
        """Does a level newer than `level` record the same posting? Only those in the bits `listed` are asked."""
        cdef int i
        cdef Cursor found
        for i in range(level):
            if not listed >> i & 1:
                continue
            found = level_seek(&self.level[i], posting.key, posting.high, posting.low, posting.slot)
            if found.leaf != NULL and compare_postings(
                found.leaf.key[found.index], found.leaf.high[found.index], found.leaf.low[found.index],
                found.leaf.slot[found.index], posting.key, posting.high, posting.low, posting.slot,
            ) == 0:
                return True
        return False

    cdef size_t level_bytes(self):
        """Bytes of all levels."""
        cdef size_t total = 0
        cdef int i
        for i in range(self.levels):
            if self.level[i].tree != NULL:
                total += tree_bytes(self.level[i].tree)
            else:
                total += self.run[i].resident_bytes
        return total

    # --- coming and going --------------------------------------------------------------------------------------------

    @property
    def overlay_postings(self):
        """Records in the overlay."""
        return self.level[0].tree.postings

    @property
    def frozen(self):
        """Is there a frozen overlay that no run has replaced yet?"""
        return self.levels > 1 and self.level[1].tree != NULL

    @property
    def runs(self):
        """The runs, newest first."""
        return tuple(run for run in self.run if run is not None)

    @property
    def missed(self):
        """How many chunks were wanted that are not in memory: the answers since the last take_missed() are void."""
        return self.missing.count

    def take_missed(self):
        """(run number, chunk) of what was wanted and is not in memory; forgets them."""
        cdef int i
        missed = [(self.missing.run[i], self.missing.chunk[i]) for i in range(self.missing.count)]
        self.missing.count = 0
        return missed

    def attach(self, PostingRun run):
        """Add a run as the oldest level; for recovery."""
        if self.levels == LEVELS_MAX:
            raise InvariantViolationError(f"a directory of more than {LEVELS_MAX} levels")
        run.attach(&self.missing)
        self.level[self.levels] = Level(NULL, &run.c)
        self.run.append(run)
        self.levels += 1
        self.version += 1
        self.unloaded += run.unloaded

    def install_chunk(self, uint32_t number, uint32_t chunk, data):
        """Take the bytes of a chunk of a run, whose checksum was found right; nothing if there is no such run any more.

        Raises ValueError if they are not this chunk's.
        """
        for run in self.run:
            if run is not None and run.number == number and not run.loaded(chunk):
                run.install(chunk, data)
                self.unloaded -= 1

    def freeze(self):
        """Freeze the overlay and lay a fresh one on top. A frozen one has to be replaced (finish_merge) before the next."""
        cdef int i
        cdef Tree* fresh
        if self.frozen:
            raise InvariantViolationError("an overlay is frozen already")
        if self.levels == LEVELS_MAX:
            raise InvariantViolationError(f"a directory of more than {LEVELS_MAX} levels")
        fresh = tree_new()
        for i in range(self.levels, 0, -1):
            self.level[i] = self.level[i - 1]
        self.level[0] = Level(fresh, NULL)
        self.run.insert(0, None)
        self.levels += 1
        self.version += 1  # walks in progress number their levels

    def begin_merge(self, int first_level, int levels, uint32_t number):
        """A merge of `levels` levels from `first_level` on into run `number`. They must be in memory, and not the overlay."""
        cdef int i
        cdef bint oldest = first_level + levels == self.levels
        if first_level < 1 or levels < 1 or first_level + levels > self.levels:
            raise InvariantViolationError(f"no merge of {levels} levels from {first_level} on: there are {self.levels}")
        keep = tuple(run for run in self.run[first_level : first_level + levels] if run is not None)
        if any(run.unloaded for run in keep):
            raise InvariantViolationError("a merge reads chunks that are not in memory")
        cdef RunMerge merge = RunMerge(number, first_level, levels, oldest, keep)
        for i in range(first_level, first_level + levels):
            merge.add_source(&self.level[i])
        return merge

    def finish_merge(self, RunMerge merge):
        """Put a finished merge's run in the place of its levels. Returns what it replaced: let it die in a helper thread."""
        cdef int i, first = merge.first_level
        cdef int replaced = merge.levels
        cdef RetiredTree tree
        retired = []
        for i in range(first, first + replaced):
            if self.level[i].tree != NULL:
                tree = RetiredTree()
                tree.tree = self.level[i].tree
                retired.append(tree)
            else:
                retired.append(self.run[i])
        merge.run.attach(&self.missing)
        self.level[first] = Level(NULL, &merge.run.c)
        self.run[first : first + replaced] = [merge.run]
        for i in range(first + replaced, self.levels):
            self.level[i - replaced + 1] = self.level[i]
        self.levels -= replaced - 1
        self.version += 1
        merge.keep = ()
        return retired

    cdef int validate_levels(self) except -1:
        """Raise InvariantViolationError for the first violated invariant."""
        cdef int i
        cdef Cursor cursor
        for i in range(self.levels):
            fault = tree_fault(self.level[i].tree) if self.level[i].tree != NULL else self.run[i].fault()
            if fault is not None:
                raise InvariantViolationError(f"D1 in level {i}: {fault}")
        if self.levels > 1 and self.level[self.levels - 1].run != NULL:
            cursor = level_begin(&self.level[self.levels - 1])
            while cursor.leaf != NULL:
                if cursor.leaf.slot[cursor.index] & REMOVED:
                    raise InvariantViolationError(f"D2: a removal of key {cursor.leaf.key[cursor.index]:#x}")
                cursor_next(&cursor)
        return 0
