from libc.stdint cimport uint16_t, uint32_t, uint64_t

from sarp_cluster.core.segment cimport SegmentColumns
from sarp_cluster.core.segment_table cimport SegmentTable


cdef bint replay_image(SegmentTable table, const SegmentColumns* columns, bint had_delta) except -1
cdef bint replay_delta(
    SegmentTable table, uint32_t slot, uint16_t tag, uint32_t namespace_id, uint64_t place, int count, int count_before,
    bint had_delta
) except -1
cdef bint replay_removal(SegmentTable table, const SegmentColumns* columns, bint stale) except -1
