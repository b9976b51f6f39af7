from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.block_id cimport NamespaceKey
from sarp_cluster.core.query cimport Query
from sarp_cluster.core.routing_directory cimport CandidateWalk, RoutingDirectory
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.segment cimport SegmentBatch, SegmentColumns
from sarp_cluster.core.segment_table cimport SegmentTable

cdef enum:
    CANDIDATES_MAX = 16        # limits.CANDIDATES_EXAMINED_MAX
    HOMES_MAX = 64             # forks descend strictly along a chain of origins


cdef struct Candidate:
    uint32_t slot
    int bound                  # blocks of the window that it can match at most
    int open                   # the filter cannot tell where it diverges
    uint64_t registered        # grows with the time of registration


cdef struct Home:
    int item
    int begin                  # blocks [begin, end) of the window are at home in this item
    int end


cdef class Search(Query):
    cdef RoutingPoints points
    cdef SegmentTable table
    cdef readonly SegmentBatch batch
    cdef SegmentBatch previous     # what an earlier attempt of the same search has read
    cdef int previous_hint

    cdef int retrieval_max
    cdef bint healing              # restore damaged ancestors
    cdef int homes_from            # windows from here on need their locations

    # the walk
    cdef bint stepwise
    cdef readonly int low          # windows low..top are searched together
    cdef readonly int top
    cdef int phase
    cdef CandidateWalk walk
    cdef size_t walk_version
    cdef int walk_point
    cdef int walk_open             # bound that the walk can still yield
    cdef Candidate candidate[CANDIDATES_MAX]
    cdef int candidates
    cdef int candidate_next
    cdef int window_items          # first item of the candidates in the batch
    cdef int window_items_end
    cdef int window_retrieved
    cdef int best_item
    cdef int* path                 # window -> item of the verified segment, or -1
    cdef int path_capacity

    # what came out
    cdef readonly int verified     # blocks from ids[0] on
    cdef readonly int reads
    cdef readonly int waves
    cdef readonly int retrieved
    cdef readonly int windows_routed
    cdef readonly size_t directory_version
    cdef readonly size_t table_version

    cdef int reset(self, int homes_from) except -1
    cdef int open_window(self, int top, int low) except -1
    cdef int open_entry(self, int blocks) except -1
    cdef int rank(self) except -1
    cdef int request(self) except -1
    cdef int add(self, uint32_t slot) except -1
    cdef int add_origins(self, int item) except -1
    cdef int add_chain(self, int item) except -1
    cdef int verify(self, int item, int window) noexcept nogil
    cdef int choose(self) except -1
    cdef int conclude(self) except -1
    cdef int advance(self) except -1
    cdef int start(self, int top, int low) except -1
    cdef bint missed(self) noexcept nogil
    cdef bint unchanged(self) noexcept nogil
    cdef void heal_ancestors(self) noexcept nogil
    cdef int homes(self, int window, int matched, Home* homes) noexcept nogil
    cpdef load(self, bytes wire, NamespaceKey key, uint32_t namespace_id, int base_window)
