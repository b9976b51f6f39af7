# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Merging levels of the routing directory into one run.

Neighbouring levels become one: of records of the same posting, or of headers of the same list and point, the newest holds.
Removals are kept, since they may hide something older, but not in the oldest level. The sources are immutable (a frozen
overlay, runs in memory), so a merge runs in a helper thread without the interpreter's lock while the owner serves.
"""

from libc.stdint cimport uint32_t

from sarp_cluster.core.posting_run cimport Level, PostingRun, level_begin
from sarp_cluster.core.posting_tree cimport (
    REMOVED,
    Cursor,
    Leaf,
    Posting,
    compare_postings,
    cursor_next,
    cursor_posting,
)

from sarp_cluster.errors import InvariantViolationError


cdef bint merged_next(Cursor* cursor, int count, Posting* least) noexcept nogil:
    """The least record of several levels, newest level first; moves all that stand at it. False at the end of all.

    A cursor without a leaf is at its end.
    """
    cdef int chosen = -1
    cdef int i, order
    cdef Leaf* leaf
    for i in range(count):
        leaf = cursor[i].leaf
        if leaf == NULL:
            continue
        if chosen >= 0:
            order = compare_postings(
                leaf.key[cursor[i].index], leaf.high[cursor[i].index], leaf.low[cursor[i].index],
                posting_identity(leaf.slot[cursor[i].index]),
                least.key, least.high, least.low, posting_identity(least.slot),
            )
            if order > 0:
                continue
            if order == 0:
                cursor_next(&cursor[i])  # an older record of the same: it never counts
                continue
        cursor_posting(cursor[i], least)
        chosen = i
    if chosen < 0:
        return False
    cursor_next(&cursor[chosen])
    return True


cdef class RunMerge:
    """Merges the levels that RoutingDirectory.begin_merge has named into `run`."""

    def __init__(self, uint32_t number, int first_level, int levels, bint oldest, tuple keep):
        self.run = PostingRun(number)
        self.first_level = first_level
        self.levels = levels
        self.oldest = oldest
        self.keep = keep  # runs that are read
        self.sources = 0

    cdef int add_source(self, const Level* level) except -1:
        """The next older level."""
        if self.sources == SOURCES_MAX:
            raise InvariantViolationError(f"a merge of more than {SOURCES_MAX} levels")
        self.cursor[self.sources] = level_begin(level)
        self.sources += 1
        return 0

    def step(self, size_t limit):
        """Move up to `limit` records, without the interpreter's lock. False when the run is complete."""
        cdef Posting posting
        cdef bint more = True
        with nogil:
            while limit > 0:
                more = merged_next(self.cursor, self.sources, &posting)
                if not more:
                    self.run.link()
                    break
                if not (self.oldest and posting.slot & REMOVED):
                    self.run.append(&posting)
                limit -= 1
        return more
