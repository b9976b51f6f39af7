from libc.stdint cimport uint64_t

from sarp_cluster.core.posting_tree cimport Posting
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.segment cimport SegmentBatch


cdef class Backfill:
    cdef RoutingPoints points
    cdef readonly uint64_t key
    cdef readonly int point
    cdef readonly int kind
    cdef Posting after         # the last that is done
    cdef Posting reached       # the last that was listed
    cdef Posting* listed
    cdef readonly bint published
