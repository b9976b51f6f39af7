# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The routing directory's changes as the log carries them: payloads of ROUTING records (docs/formats.md).

A change says what is so from now on, a posting registered or removed, or the state of a list, not what was done. So what holds
after many is the last of each, whatever was there before, and a replay may sort them first: entering 70,000 postings in order
costs a third of entering them as they come.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcpy

from sarp_cluster.core.posting_tree cimport Posting, compare_postings
from sarp_cluster.core.run_merge cimport posting_identity

cdef enum:
    PAYLOAD_POSTINGS = 8192    # of one ROUTING record
    PACKED_BYTES = 28
    BUCKET_BITS = 12           # keys are uniform: the first bits divide them evenly

cdef packed struct JournalHeader:
    uint32_t count
    int32_t registrations
    int32_t entries
    uint32_t zero

cdef packed struct PackedPosting:
    uint64_t key
    uint64_t high
    uint64_t low
    uint32_t slot


cdef list pack_journal(const Posting* posting, size_t count, long registrations, long entries):
    """Payloads that hold these changes; the last one carries what all change together: they are applied together."""
    cdef list payloads = []
    cdef bytes payload
    cdef JournalHeader* header
    cdef PackedPosting* packed
    cdef size_t begin = 0
    cdef size_t part, i
    while begin < count:
        part = min(count - begin, <size_t>PAYLOAD_POSTINGS)
        payload = PyBytes_FromStringAndSize(NULL, sizeof(JournalHeader) + part * PACKED_BYTES)
        header = <JournalHeader*>PyBytes_AS_STRING(payload)
        header[0] = JournalHeader(<uint32_t>part, 0, 0, 0)
        if begin + part == count:
            header.registrations = <int32_t>registrations
            header.entries = <int32_t>entries
        packed = <PackedPosting*>(header + 1)
        for i in range(part):
            packed[i] = PackedPosting(
                posting[begin + i].key, posting[begin + i].high, posting[begin + i].low, posting[begin + i].slot
            )
        payloads.append(payload)
        begin += part
    return payloads


cdef int compare_changes(const void* a, const void* b) noexcept nogil:
    cdef const Change* left = <const Change*>a
    cdef const Change* right = <const Change*>b
    cdef int order = compare_postings(
        left.posting.key, left.posting.high, left.posting.low, posting_identity(left.posting.slot),
        right.posting.key, right.posting.high, right.posting.low, posting_identity(right.posting.slot),
    )
    if order:
        return order
    return -1 if left.order < right.order else 1


cdef class SortedJournal:
    """Changes in the order of postings, of each only the last. Raises ValueError for a payload that makes no sense."""

    def __init__(self, list payloads):
        cdef const uint8_t[::1] payload
        cdef JournalHeader header
        cdef Change* change
        cdef size_t total = 0
        for payload in payloads:
            if payload.shape[0] < <Py_ssize_t>sizeof(JournalHeader):
                raise ValueError("a record of routing changes is too short")
            memcpy(&header, &payload[0], sizeof(JournalHeader))
            if payload.shape[0] != <Py_ssize_t>(sizeof(JournalHeader) + <size_t>header.count * PACKED_BYTES):
                raise ValueError("a record of routing changes has a wrong length")
            self.registrations += header.registrations
            self.entries += header.entries
            total += header.count
        if total >= <size_t>0xFFFFFFFFu:
            raise ValueError("too many routing changes behind one snapshot")
        change = <Change*>malloc(max(total, <size_t>1) * sizeof(Change))
        if change == NULL:
            raise MemoryError("routing journal")
        try:
            self.scatter(payloads, change, total)
            self.posting = <Posting*>malloc(max(total, <size_t>1) * sizeof(Posting))
            if self.posting == NULL:
                raise MemoryError("routing journal")
            self.keep_last(change, total)
        finally:
            free(change)

    def __dealloc__(self):
        free(self.posting)

    cdef int scatter(self, list payloads, Change* change, size_t total) except -1:
        """Put the changes in order: first by the leading bits of their keys, then each part by itself."""
        cdef const uint8_t[::1] payload
        cdef const uint8_t* at
        cdef PackedPosting packed
        cdef size_t* end = <size_t*>calloc((1 << BUCKET_BITS) + 1, sizeof(size_t))
        cdef size_t bucket, begin, i
        cdef uint32_t order = 0
        if end == NULL:
            raise MemoryError("routing journal")
        for payload in payloads:
            at = &payload[0] + sizeof(JournalHeader)
            for i in range((payload.shape[0] - sizeof(JournalHeader)) // PACKED_BYTES):
                memcpy(&packed, at + i * PACKED_BYTES, sizeof(uint64_t))
                end[(packed.key >> (64 - BUCKET_BITS)) + 1] += 1
        for bucket in range(1 << BUCKET_BITS):
            end[bucket + 1] += end[bucket]
        # end[b] is where part b begins; filling it moves it to where it ends, which is where part b + 1 begins.
        for payload in payloads:
            at = &payload[0] + sizeof(JournalHeader)
            for i in range((payload.shape[0] - sizeof(JournalHeader)) // PACKED_BYTES):
                memcpy(&packed, at + i * PACKED_BYTES, PACKED_BYTES)
                bucket = packed.key >> (64 - BUCKET_BITS)
                change[end[bucket]] = Change(Posting(packed.key, packed.high, packed.low, packed.slot), order)
                end[bucket] += 1
                order += 1
        begin = 0
        with nogil:
            for bucket in range(1 << BUCKET_BITS):
                if end[bucket] - begin > 1:
                    qsort(change + begin, end[bucket] - begin, sizeof(Change), compare_changes)
                begin = end[bucket]
        free(end)
        return 0

    cdef void keep_last(self, const Change* change, size_t total) noexcept nogil:
        """Of the changes of one posting, or of one list's state, keep the last."""
        cdef size_t i
        cdef const Posting* one
        cdef const Posting* following
        for i in range(total):
            one = &change[i].posting
            if i + 1 < total:
                following = &change[i + 1].posting
                if compare_postings(
                    one.key, one.high, one.low, posting_identity(one.slot),
                    following.key, following.high, following.low, posting_identity(following.slot),
                ) == 0:
                    continue
            self.posting[self.count] = one[0]
            self.count += 1
