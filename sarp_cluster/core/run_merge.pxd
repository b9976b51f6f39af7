from libc.stdint cimport uint32_t

from sarp_cluster.core.posting_run cimport Level, PostingRun
from sarp_cluster.core.posting_tree cimport Cursor, Posting

cdef enum:
    SOURCES_MAX = 16


cdef class RunMerge:
    cdef Cursor cursor[SOURCES_MAX]
    cdef int sources
    cdef bint oldest
    cdef tuple keep
    cdef readonly PostingRun run
    cdef readonly int first_level
    cdef readonly int levels

    cdef int add_source(self, const Level* level) except -1


cdef inline uint32_t posting_identity(uint32_t slot) noexcept nogil:
    """What of a slot tells records apart: not a removal's mark, and of a header only its point."""
    slot &= 0x7FFFFFFFu
    return slot & ~<uint32_t>63 if slot < 4096 else slot


cdef bint merged_next(Cursor* cursor, int count, Posting* least) noexcept nogil
