from libc.stdint cimport uint32_t

from sarp_cluster.core.posting_tree cimport Posting
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.segment cimport SegmentColumns
from sarp_cluster.core.segment_table cimport SegmentTable


cdef class StalePostings:
    cdef RoutingPoints points
    cdef SegmentTable table
    cdef size_t marks          # what was marked as stale after the round began waits for the next one
    cdef Posting after         # the last posting that was looked at
    cdef Posting* found        # of `found_count`: postings of stale slots
    cdef int found_count
    cdef dict kept             # slots that could not be judged
    cdef readonly size_t discarded

    cdef bint is_true(self, const Posting* posting, const SegmentColumns* segment) noexcept


cdef int remove_segment(SegmentTable table, uint32_t slot, bint stale) except -1
cdef int clear_stale(SegmentTable table, uint32_t slot) except -1
