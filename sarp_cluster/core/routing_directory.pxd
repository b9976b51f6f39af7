from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.directory_levels cimport LEVELS_MAX, DirectoryLevels
from sarp_cluster.core.parameters cimport Parameters
from sarp_cluster.core.posting_tree cimport Cursor, Posting

cdef enum:
    STATE_BITS = 6             # of a header's slot; the bits above them are its point

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
    int listed                   # bit i: level i has records of the list
    uint64_t key
    uint64_t high
    uint64_t low
    Cursor left[LEVELS_MAX]
    Cursor right[LEVELS_MAX]
    int left_equal[LEVELS_MAX]   # -1: exhausted
    int right_equal[LEVELS_MAX]


cdef class RoutingDirectory(DirectoryLevels):
    cdef readonly size_t registrations
    cdef readonly size_t entries
    cdef readonly set building    # (key, point, kind) of what is being built
    cdef Parameters parameters
    cdef public bint journaling
    cdef Posting* journal         # changes since they were last taken
    cdef size_t journal_count
    cdef size_t journal_capacity
    cdef long journal_registrations
    cdef long journal_entries

    cdef int add(self, const Posting* posting) except -1 nogil
    cdef int discard(self, const Posting* posting) except -1 nogil
    cdef int note(self, const Posting* posting, int registrations, int entries) except -1 nogil
    cdef int put_header(self, const Posting* header) except -1 nogil
    cdef int note_building(self, const Posting* header) except -1
    cdef bint probe(self, uint64_t key, int point, int* state) noexcept nogil
    cdef int state(self, uint64_t key, int point) noexcept nogil
    cdef int set_state(self, uint64_t key, int point, int state) except -1
    cdef size_t count_up_to(self, uint64_t key, size_t limit) noexcept nogil
    cdef size_t slots_after(self, const Posting* after, Posting* out, size_t limit) noexcept nogil
    cdef void touch(self, const Posting* posting) noexcept nogil
    cdef void walk_begin(self, CandidateWalk* walk, uint64_t key, uint64_t high, uint64_t low) noexcept nogil
    cdef int walk_next(self, CandidateWalk* walk, uint32_t* slot) noexcept nogil
    cdef int equal_at(self, const CandidateWalk* walk, Cursor cursor) noexcept nogil
