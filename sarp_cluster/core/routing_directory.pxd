from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.parameters cimport Parameters
from sarp_cluster.core.posting_tree cimport Cursor, Posting, Tree

cdef enum:
    LEVELS_MAX = 3

# What an entry knows of the points behind it: two bits each.
cdef enum:
    NEXT = 0                   # shift: the next base point
    MIDPOINT = 2               # shift: the midpoint of the interval
    LAST_BLOCK = 4             # shift: the segment's last block
    ABSENT = 0                 # no entries there: this one is authoritative
    BUILDING = 1               # entries are being built, hidden from queries
    PUBLISHED = 2              # entries are complete


cdef struct CandidateWalk:
    int levels
    uint64_t key
    uint64_t high
    uint64_t low
    Cursor left[LEVELS_MAX]
    Cursor right[LEVELS_MAX]
    int left_equal[LEVELS_MAX]   # -1: exhausted
    int right_equal[LEVELS_MAX]


cdef class RoutingDirectory:
    cdef Tree* level[LEVELS_MAX]  # newest first: overlay, the overlay being merged, base
    cdef int levels
    cdef Tree* merged             # the base being built
    cdef Tree* retired[LEVELS_MAX]  # levels that a merge replaced, freed little by little
    cdef int retired_count
    cdef Cursor merge_newer
    cdef Cursor merge_older
    cdef readonly size_t registrations
    cdef readonly size_t entries
    cdef readonly size_t version
    cdef Parameters parameters

    cdef bint live_below(self, int level, const Posting* posting) noexcept nogil
    cdef bint shadowed(self, int level, const Posting* posting) noexcept nogil
    cdef int add(self, const Posting* posting) except -1 nogil
    cdef int discard(self, const Posting* posting) except -1 nogil
    cdef bint probe(self, uint64_t key, int* state) noexcept nogil
    cdef int state(self, uint64_t key) noexcept nogil
    cdef int set_state(self, uint64_t key, int state) except -1 nogil
    cdef size_t count_up_to(self, uint64_t key, size_t limit) noexcept nogil
    cdef size_t slots_after(self, const Posting* after, Posting* out, size_t limit) noexcept nogil
    cdef void walk_begin(self, CandidateWalk* walk, uint64_t key, uint64_t high, uint64_t low) noexcept nogil
    cdef int walk_next(self, CandidateWalk* walk, uint32_t* slot) noexcept nogil
    cdef int equal_at(self, const CandidateWalk* walk, Cursor cursor) noexcept nogil
    cdef void finish_merge(self) noexcept
