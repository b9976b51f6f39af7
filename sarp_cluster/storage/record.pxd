from libc.stdint cimport uint8_t, uint32_t, uint64_t

from sarp_cluster.core.segment cimport LocationRun, SegmentBatch, SegmentColumns

cdef enum:
    FRAME_BYTES = 32
    # record types
    IMAGE_RECORD = 1
    DELTA_RECORD = 2


cdef uint32_t segment_bytes(const SegmentColumns* segment, const LocationRun* runs) noexcept nogil
cdef void write_segment(uint8_t* record, const SegmentColumns* segment, const LocationRun* runs) noexcept nogil
cdef void seal_frame(
    uint8_t* record, int kind, uint32_t payload_bytes, uint64_t lsn, uint32_t file, uint64_t offset, uint32_t incarnation
) noexcept nogil
cdef int check_frame(const uint8_t* record, uint32_t length, uint32_t file, uint64_t offset) noexcept nogil
cdef int read_segment(
    SegmentBatch batch, int item, const uint8_t* image, const uint8_t* delta
) except -1
