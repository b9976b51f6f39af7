# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The books of the log files: how long each is, and how many bytes of it segments point to.

What is known after a recovery is how long the files are. The bytes that segments point to are counted by going through the
segment table in slices (`count`), while the index is at work: a segment below the hand is counted and kept exact, one
above it is counted as the hand finds it. Only once the hand is through do the numbers say anything about a file.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport place_file, place_length
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable


cdef class LogFiles:
    """The log files of a store, by number."""

    def __cinit__(self):
        self.length = <uint64_t*>calloc(FILES_MAX, sizeof(uint64_t))
        self.live = <int64_t*>calloc(FILES_MAX, sizeof(int64_t))
        if self.length == NULL or self.live == NULL:
            raise MemoryError("log files")

    def __init__(self, dict lengths=None, int64_t live_bytes=0):
        cdef uint16_t file
        cdef uint64_t length
        self.live_bytes = live_bytes
        self.counted_end = FIRST_SLOT
        self.listed = set()
        self.header_bytes = {}
        for file, length in (lengths or {}).items():
            self.grow(file, length)
            self.listed.add(file)

    def __dealloc__(self):
        free(self.length)
        free(self.live)

    # --- which files there are -------------------------------------------------------------------------------------------

    def names(self):
        """What a file's header says of the older ones: how many, and their numbers."""
        older = sorted(self.listed)
        return len(older).to_bytes(4, "little") + b"".join([file.to_bytes(2, "little") for file in older])

    def begin(self, uint16_t file, uint64_t header_bytes):
        """A file was begun."""
        self.listed.add(file)
        self.header_bytes[file] = header_bytes

    def unlist(self, uint16_t file):
        """The record that a file is reclaimed was appended: headers from now on do not name it."""
        self.listed.discard(file)

    def forget(self, uint16_t file):
        """A file is gone."""
        self.listed.discard(file)
        self.header_bytes.pop(file, None)
        self.disk_bytes -= self.length[file]
        self.length[file] = 0

    def bytes_of(self, uint16_t file):
        """How long a file is, what waits in memory included; 0: there is none."""
        return self.length[file]

    # --- what is live in them --------------------------------------------------------------------------------------------

    cdef void count_place(self, uint32_t slot, uint64_t place, int sign) noexcept nogil:
        """A segment points to this place from now on (1), or no longer (-1)."""
        if place:
            self.live_bytes += sign * <int64_t>place_length(place)
            if slot < self.counted_end:
                self.live[place_file(place)] += sign * <int64_t>place_length(place)

    def note_gone(self, uint32_t slot, *places):
        """The segment that points to these places is gone."""
        cdef uint64_t place
        for place in places:
            self.count_place(slot, place, -1)

    def note_dead(self, const uint64_t[::1] places):
        """Segments that point to these places were counted as alive and have others: that is found as rows are loaded."""
        cdef Py_ssize_t i
        for i in range(places.shape[0]):
            self.live_bytes -= place_length(places[i])

    @property
    def counted(self):
        """Are the live bytes of each file known?"""
        return self.counted_end == ALL_COUNTED

    def count(self, SegmentTable table, uint32_t rows):
        """Count what the next `rows` rows of the table point to. True when all are counted."""
        cdef SegmentRow* row
        cdef uint32_t slot, file
        cdef uint32_t end
        if self.counted_end == ALL_COUNTED:
            return True
        end = <uint32_t>min(<uint64_t>self.counted_end + rows, <uint64_t>table.next_slot)
        for slot in range(self.counted_end, end):
            row = table.row(slot)
            if row.count:
                self.live[place_file(row.image)] += place_length(row.image)
                if row.delta:
                    self.live[place_file(row.delta)] += place_length(row.delta)
        self.counted_end = end
        if end < table.next_slot:
            return False
        self.counted_end = ALL_COUNTED
        self.live_bytes = 0
        for file in range(FILES_MAX):
            self.live_bytes += self.live[file]
        return True

    def live_in(self, uint16_t file):
        """Bytes of a file that segments point to; only once they are counted."""
        return self.live[file]
