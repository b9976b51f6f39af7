from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from sarp_cluster.core.segment cimport LocationRun, SegmentBatch, SegmentColumns

cdef enum:
    FRAME_BYTES = 32
    # record types
    IMAGE_RECORD = 1
    DELTA_RECORD = 2
    NAMESPACE_RECORD = 3
    WORKER_RECORD = 4
    WORKER_MARK_RECORD = 5
    FILE_HEADER_RECORD = 6
    GROUP_RECORD = 7           # what was durable when a group of records was written
    ROUTING_RECORD = 8         # what changed in the routing directory
    RECLAIMED_RECORD = 9       # a log file of which nothing is needed any more
    REMOVAL_RECORD = 10        # a segment that is gone
    LOST_RECORD = 11           # a record of a segment that could not be read and is not needed any more


cdef packed struct Frame:
    uint16_t magic
    uint8_t kind
    uint8_t version
    uint32_t payload_bytes
    uint64_t lsn
    uint32_t file
    uint32_t offset_units      # offset / 8
    uint32_t incarnation
    uint32_t checksum

cdef packed struct ImageHeader:
    uint32_t slot
    uint16_t tag
    uint16_t window
    uint32_t namespace_id
    uint32_t parent
    uint32_t origin
    uint16_t parent_tag
    uint16_t origin_tag
    uint8_t fork
    uint8_t count
    uint16_t runs
    uint16_t handles
    uint8_t count_before       # blocks the segment had; 0: it is new
    uint8_t had_delta

cdef packed struct DeltaHeader:
    uint32_t slot
    uint16_t tag
    uint16_t window
    uint32_t namespace_id
    uint8_t image_count
    uint8_t count
    uint16_t runs
    uint16_t handles
    uint8_t count_before
    uint8_t had_delta
    uint32_t zero


cdef packed struct RemovalHeader:
    uint32_t slot
    uint16_t tag
    uint8_t fork
    uint8_t count              # blocks the segment had; 0: that it is gone was said before
    uint32_t parent
    uint32_t origin
    uint8_t had_delta
    uint8_t stale              # 1: its postings are not known and still there
    uint16_t zero
    uint32_t zero_too


cdef uint32_t segment_bytes(const SegmentColumns* segment, const LocationRun* runs) noexcept nogil
cdef void write_segment(uint8_t* record, const SegmentColumns* segment, const LocationRun* runs) noexcept nogil
cdef void seal_frame(
    uint8_t* record, int kind, uint32_t payload_bytes, uint64_t lsn, uint32_t file, uint64_t offset, uint32_t incarnation
) noexcept nogil
cdef int check_frame(const uint8_t* record, uint32_t length, uint32_t file, uint64_t offset) noexcept nogil
cdef int read_segment(
    SegmentBatch batch, int item, const uint8_t* image, const uint8_t* delta
) except -1
