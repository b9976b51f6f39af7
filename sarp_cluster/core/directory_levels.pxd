from libc.stdint cimport uint32_t

from sarp_cluster.core.posting_run cimport Level
from sarp_cluster.core.posting_tree cimport MissedChunks, Posting

cdef enum:
    LEVELS_MAX = 12            # overlay, frozen overlay, limits.DIRECTORY_RUNS_MAX runs, and room to spare


cdef class DirectoryLevels:
    cdef Level level[LEVELS_MAX]  # newest first: overlay, frozen overlay if there is one, runs
    cdef int levels
    cdef list run                 # of each level its PostingRun, or None
    cdef MissedChunks missing
    cdef readonly size_t version
    cdef readonly size_t unloaded # chunks of runs that are not in memory

    cdef bint live_below(self, int level, const Posting* posting) noexcept nogil
    cdef bint shadowed(self, int level, int listed, const Posting* posting) noexcept nogil
    cdef size_t level_bytes(self)
    cdef int validate_levels(self) except -1
