# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The open end of the log, and the reading of segments from all of it.

Records are appended in memory, which costs no system call, and written out in the background (storage.log). Until a record
has been written it is read from here.

Reading a batch never waits in `read_cached`: it takes what lies in memory or in the page cache (preadv2 with RWF_NOWAIT)
and leaves the rest. `read_wait`, for a helper thread, first tells the kernel every range it will want (posix_fadvise
WILLNEED) and then reads them one after the other: the device works on all of them at once. Ranges that lie close together
are read by one call.
"""

from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memcpy

from sarp_cluster.core.segment cimport (
    DAMAGED,
    TO_READ,
    DELTA,
    SegmentBatch,
    SegmentColumns,
    pack_place,
    place_file,
    place_length,
    place_offset,
)
from sarp_cluster.storage.log_files cimport LogFiles
from sarp_cluster.storage.record cimport (
    FRAME_BYTES,
    ROUTING_RECORD,
    check_frame,
    read_segment,
    seal_frame,
    segment_bytes,
    write_segment,
)

from sarp_cluster import limits
from sarp_cluster.errors import InvariantViolationError, StorageError
from sarp_cluster.storage.record import RecordType, frame_record

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <sys/uio.h>
    #include <unistd.h>
    #ifndef RWF_NOWAIT
    #define RWF_NOWAIT 0x00000008
    #endif
    /* Kernels or file systems without RWF_NOWAIT answer EOPNOTSUPP: the caller then waits in a helper thread. */
    static ssize_t sarp_read(int fd, void *to, size_t length, off_t offset, int wait) {
        struct iovec vector = { to, length };
        if (wait) return pread(fd, to, length, offset);
        return preadv2(fd, &vector, 1, offset, RWF_NOWAIT);
    }
    static void sarp_will_need(int fd, off_t offset, off_t length) {
        (void)posix_fadvise(fd, offset, length, POSIX_FADV_WILLNEED);
    }
    """
    ssize_t sarp_read(int fd, void* to, size_t length, long offset, int wait) noexcept nogil
    void sarp_will_need(int fd, long offset, long length) noexcept nogil

cdef uint64_t GAP_MAX = limits.READ_GAP_BYTES_MAX
cdef uint64_t RECORD_MAX = 0xFFFF * 8

cdef enum:
    CHUNK_BYTES = 262_144


cdef inline uint64_t place_order(uint64_t place) noexcept nogil:
    """Places in the order of files and offsets."""
    return (place >> 48 << 32) | (place & 0xFFFFFFFFu)


cdef int compare_ranges(const void* a, const void* b) noexcept nogil:
    cdef uint64_t left = place_order((<const ReadRange*>a).place)
    cdef uint64_t right = place_order((<const ReadRange*>b).place)
    return -1 if left < right else left > right


cdef void sort_ranges(ReadRange* range_, int count) noexcept nogil:
    """By place. A match has a few ranges, the longest contexts a thousand."""
    cdef int i, j
    cdef ReadRange moved
    if count > 40:
        qsort(range_, count, sizeof(ReadRange), compare_ranges)
        return
    for i in range(1, count):
        moved = range_[i]
        j = i
        while j > 0 and place_order(range_[j - 1].place) > place_order(moved.place):
            range_[j] = range_[j - 1]
            j -= 1
        range_[j] = moved


cdef class LogTail:
    """The open end of the log, and the reading of segments from all of it. Owned by one thread, but for `read_wait`."""

    def __init__(
        self, uint64_t file_bytes_max, uint32_t incarnation, uint32_t file, uint64_t lsn, bytes header, LogFiles files=None,
    ):
        cdef int i
        for i in range(FILES_MAX):
            self.descriptor[i] = -1
        self.file_bytes_max = file_bytes_max
        self.incarnation = incarnation
        self.file = file
        self.lsn = lsn
        self.header = header
        self.files = LogFiles() if files is None else files
        self.journal = None
        self.begin_file()

    def __dealloc__(self):
        cdef int i
        for i in range(self.chunks):
            free(self.chunk[i].data)
        free(self.chunk)

    # --- appending -----------------------------------------------------------------------------------------------------

    cdef int begin_file(self) except -1:
        """Write the header record of the present file: it names the older ones that there are."""
        self.offset = 0
        self.append_record(RecordType.FILE_HEADER, self.header + self.files.names())
        self.header_end = self.offset
        self.files.begin(self.file, self.header_end)
        return 0

    def next_file(self):
        """Go on in a new file, so that the present one can be reclaimed. Nothing happens while that is empty."""
        if self.offset > self.header_end:
            self.file += 1
            self.begin_file()

    cdef uint8_t* room(self, uint64_t size) except NULL:
        """Where the next `size` bytes of the log are to be written; counts them as appended."""
        cdef Chunk* chunk
        cdef void* memory
        cdef int capacity
        if self.file >= 0xFFFF:
            raise StorageError("the log has used all its 65,535 file numbers")
        if self.chunks == self.sealed or self.chunk[self.chunks - 1].file != self.file or (
            self.chunk[self.chunks - 1].length + size > self.chunk[self.chunks - 1].capacity
        ):
            if self.chunks == self.chunk_capacity:
                capacity = max(8, 2 * self.chunk_capacity)
                memory = realloc(self.chunk, capacity * sizeof(Chunk))
                if memory == NULL:
                    raise MemoryError("log tail")
                self.chunk = <Chunk*>memory
                self.chunk_capacity = capacity
            chunk = &self.chunk[self.chunks]
            chunk.capacity = max(size, <uint64_t>CHUNK_BYTES)
            chunk.data = <uint8_t*>malloc(chunk.capacity)
            if chunk.data == NULL:
                raise MemoryError("log tail")
            chunk.file = self.file
            chunk.begin = self.offset
            chunk.length = 0
            self.chunks += 1
        chunk = &self.chunk[self.chunks - 1]
        chunk.length += size
        self.offset += size
        self.files.grow(self.file, size)
        self.bytes_appended += size
        return chunk.data + chunk.length - size

    cdef int make_room_in_file(self, uint64_t size) except -1:
        if self.offset + size > self.file_bytes_max and self.offset > self.header_end:
            self.file += 1
            self.begin_file()
        return 0

    def append_record(self, int kind, bytes payload):
        """Append a record. Returns its LSN."""
        cdef uint64_t size = (FRAME_BYTES + len(payload) + 7) & ~7
        cdef uint8_t* at
        cdef const uint8_t* source
        if size > RECORD_MAX:
            raise InvariantViolationError("a record is over 512 KiB")
        if kind != RecordType.FILE_HEADER:
            self.make_room_in_file(size)
        record = frame_record(kind, payload, self.lsn + 1, self.file, self.offset, self.incarnation)
        at = self.room(size)
        source = record
        for i in range(size):
            at[i] = source[i]
        self.lsn += 1
        return self.lsn

    def append_segments(self, SegmentBatch writes):
        """Append the record that each write asks for, and note in it where that stands.

        They stand in one file, one behind the other, so that later reads of one sequence are few.
        """
        cdef SegmentColumns* segment
        cdef uint64_t total = 0
        cdef uint32_t size
        cdef uint8_t* at
        cdef int i
        cdef uint64_t place
        for i in range(writes.count):
            size = segment_bytes(&writes.item[i], &writes.run[writes.item[i].runs_begin])
            if size > RECORD_MAX:
                raise InvariantViolationError("a segment's record is over 512 KiB")
            total += size
        self.make_room_in_file(total)
        for i in range(writes.count):
            segment = &writes.item[i]
            size = segment_bytes(segment, &writes.run[segment.runs_begin])
            place = pack_place(self.file, self.offset, size)
            at = self.room(size)
            write_segment(at, segment, &writes.run[segment.runs_begin])
            self.lsn += 1
            # The padding belongs to the payload: it is zero and covered by the checksum.
            seal_frame(at, segment.write, size - FRAME_BYTES, self.lsn, self.file, place_offset(place), self.incarnation)
            self.files.count_place(segment.slot, place, 1)
            self.files.count_place(segment.slot, segment.delta, -1)
            if segment.write == DELTA:
                segment.delta = place
            else:
                self.files.count_place(segment.slot, segment.image, -1)
                segment.image = place
                segment.delta = 0

    # --- writing out -----------------------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self):
        """Bytes that wait in memory."""
        cdef uint64_t total = 0
        cdef int i
        for i in range(self.chunks):
            total += self.chunk[i].length
        return total

    def append_journal(self):
        """Append what the journal has gathered since it was last asked, each piece as a record of its own."""
        if self.journal is not None:
            for payload in self.journal():
                self.append_record(ROUTING_RECORD, payload)

    def begin_write(self, uint64_t durable_lsn, bint vouch=False):
        """Seal what is in memory: (file, offset, bytes) in order, to be written while appending goes on.

        With `vouch` there is a group even if nothing is in memory, for the sake of what it says was durable.

        The group ends with a record of what was durable when it was written: a record that does not verify below such a
        mark was damaged, above all marks it is a tail that was never acknowledged.
        """
        cdef int i
        if self.sealed:
            raise InvariantViolationError("the log's tail is already being written")
        self.append_journal()
        if self.chunks or vouch:
            self.append_record(RecordType.GROUP, durable_lsn.to_bytes(8, "little"))
        self.sealed = self.chunks
        return [
            (
                self.chunk[i].file,
                self.chunk[i].begin,
                PyMemoryView_FromMemory(<char*>self.chunk[i].data, self.chunk[i].length, 0x100),
            )
            for i in range(self.sealed)
        ]

    def end_write(self):
        """What was sealed has been written: from now on it is read from the files."""
        cdef int i
        for i in range(self.sealed):
            free(self.chunk[i].data)
        for i in range(self.sealed, self.chunks):
            self.chunk[i - self.sealed] = self.chunk[i]
        self.chunks -= self.sealed
        self.sealed = 0

    def set_descriptor(self, uint16_t file, int descriptor):
        """The open file to read log file `file` from; -1: none."""
        self.descriptor[file] = descriptor

    # --- reading ---------------------------------------------------------------------------------------------------------

    cdef const uint8_t* in_memory(self, uint64_t place) noexcept nogil:
        """The record at `place` where it waits for its write, or NULL."""
        cdef uint64_t offset = place_offset(place)
        cdef uint32_t file = place_file(place)
        cdef int i
        for i in range(self.chunks - 1, -1, -1):
            if self.chunk[i].file == file and self.chunk[i].begin <= offset < self.chunk[i].begin + self.chunk[i].length:
                return self.chunk[i].data + (offset - self.chunk[i].begin)
        return NULL

    def read_cached(self, SegmentBatch batch):
        """Read the batch's segments that need no wait. Returns how many are left to read."""
        return self.read(batch, False)

    def read_wait(self, SegmentBatch batch):
        """Read the segments that are left, waiting for the disk; for a helper thread, while the owner goes on."""
        self.read(batch, True)

    cdef int read(self, SegmentBatch batch, bint wait) except -1:
        cdef ReadRange* ranges
        cdef uint8_t* scratch = NULL
        cdef uint8_t* copy = NULL
        cdef const uint8_t** found
        cdef uint64_t total = 0, copied = 0, place
        cdef uint32_t length
        cdef int count = 0, left = 0, calls, i, j
        cdef SegmentColumns* segment
        for i in range(batch.count):
            left += batch.item[i].state == TO_READ
        if left == 0:
            return 0
        ranges = <ReadRange*>malloc(2 * left * sizeof(ReadRange))
        found = <const uint8_t**>malloc(2 * batch.count * sizeof(uint8_t*))
        if ranges == NULL or found == NULL:
            free(ranges)
            free(found)
            raise MemoryError("read")
        try:
            for i in range(batch.count):
                segment = &batch.item[i]
                if segment.state != TO_READ:
                    continue
                found[2 * i] = NULL
                found[2 * i + 1] = NULL
                for j in range(2):
                    place = segment.delta if j else segment.image
                    if j and not place:
                        continue
                    found[2 * i + j] = self.in_memory(place)
                    if found[2 * i + j] == NULL:
                        ranges[count] = ReadRange(place, i, j, 0, 0)
                        count += 1
                    elif wait:
                        copied += place_length(place)
            if copied:
                # The owner may free the tail's memory while this thread waits for the disk: take what lies there first.
                # Both hold the interpreter's lock where they look at the tail.
                copy = <uint8_t*>malloc(copied)
                if copy == NULL:
                    raise MemoryError("read")
                copied = 0
                for i in range(batch.count):
                    segment = &batch.item[i]
                    if segment.state != TO_READ:
                        continue
                    for j in range(2):
                        if found[2 * i + j] != NULL:
                            length = place_length(segment.delta if j else segment.image)
                            memcpy(copy + copied, found[2 * i + j], length)
                            found[2 * i + j] = copy + copied
                            copied += length
            if count:
                sort_ranges(ranges, count)
                for i in range(count):
                    # Neighbours share a read, the gap between them included.
                    if i and place_file(ranges[i].place) == place_file(ranges[i - 1].place) and (
                        place_offset(ranges[i].place)
                        <= place_offset(ranges[i - 1].place) + place_length(ranges[i - 1].place) + GAP_MAX
                    ):
                        total = ranges[i - 1].at + place_offset(ranges[i].place) - place_offset(ranges[i - 1].place)
                    ranges[i].at = total
                    total += place_length(ranges[i].place)
                scratch = <uint8_t*>malloc(total)
                if scratch == NULL:
                    raise MemoryError("read")
                with nogil:
                    calls = self.read_ranges(ranges, count, scratch, wait)
                self.calls += calls
                for i in range(count):
                    if ranges[i].arrived:
                        found[2 * ranges[i].item + ranges[i].is_delta] = scratch + ranges[i].at
            left = 0
            for i in range(batch.count):
                segment = &batch.item[i]
                if segment.state != TO_READ:
                    continue
                if found[2 * i] == NULL or (segment.delta and found[2 * i + 1] == NULL):
                    if wait:  # it ends before the record does, or cannot be read
                        segment.state = DAMAGED
                        self.damaged += 1
                    left += not wait
                    continue
                if (
                    check_frame(found[2 * i], place_length(segment.image), place_file(segment.image),
                                place_offset(segment.image)) < 0
                    or (segment.delta and check_frame(found[2 * i + 1], place_length(segment.delta),
                                                      place_file(segment.delta), place_offset(segment.delta)) < 0)
                ):
                    segment.state = DAMAGED
                else:
                    read_segment(batch, i, found[2 * i], found[2 * i + 1])
                self.damaged += batch.item[i].state == DAMAGED
            return left
        finally:
            free(ranges)
            free(found)
            free(scratch)
            free(copy)

    cdef int read_ranges(self, ReadRange* ranges, int count, uint8_t* scratch, bint wait) noexcept nogil:
        """Read sorted ranges into the scratch buffer, neighbours by one call, and note which arrived whole.

        Returns the number of read calls.
        """
        cdef int begin, end, step, fd
        cdef int calls = 0
        cdef uint64_t offset, length
        for step in range(0 if wait else 1, 2):  # first tell the kernel all of it, where this thread may wait
            begin = 0
            while begin < count:
                end = begin + 1
                while end < count and place_file(ranges[end].place) == place_file(ranges[begin].place) and (
                    ranges[end].at - ranges[begin].at == place_offset(ranges[end].place) - place_offset(ranges[begin].place)
                ):
                    end += 1
                fd = self.descriptor[place_file(ranges[begin].place)]
                offset = place_offset(ranges[begin].place)
                length = ranges[end - 1].at + place_length(ranges[end - 1].place) - ranges[begin].at
                if fd >= 0 and step == 0:
                    sarp_will_need(fd, offset, length)
                elif fd >= 0:
                    calls += read_whole(
                        fd, scratch + ranges[begin].at, length, offset, wait, ranges + begin, end - begin
                    )
                begin = end
        return calls


cdef int read_whole(
    int fd, uint8_t* to, uint64_t length, uint64_t offset, bint wait, ReadRange* ranges, int count
) noexcept nogil:
    """One range, or several neighbours. A short read that may not wait leaves what did not arrive for later."""
    cdef uint64_t done = 0
    cdef ssize_t got
    cdef int calls = 0
    cdef int i
    while done < length:
        calls += 1
        got = sarp_read(fd, to + done, length - done, offset + done, wait)
        if got < 0 and errno == EINTR:
            continue
        if got <= 0:
            break
        done += got
        if not wait:
            break
    for i in range(count):
        ranges[i].arrived = place_offset(ranges[i].place) - offset + place_length(ranges[i].place) <= done
    return calls
