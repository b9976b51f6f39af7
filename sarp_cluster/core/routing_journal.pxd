from libc.stdint cimport uint32_t

from sarp_cluster.core.posting_tree cimport Posting


cdef struct Change:
    Posting posting
    uint32_t order             # a later change has a higher one


cdef list pack_journal(const Posting* posting, size_t count, long registrations, long entries)


cdef class SortedJournal:
    cdef Posting* posting
    cdef size_t count
    cdef long registrations
    cdef long entries
    cdef int scatter(self, list payloads, Change* change, size_t total) except -1
    cdef void keep_last(self, const Change* change, size_t total) noexcept nogil
