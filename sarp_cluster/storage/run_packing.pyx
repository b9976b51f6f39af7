# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Packing run files (run_file): chunks with their checksums, and rows of several runs merged into those of one.

For a helper thread that runs beside the owner of the index. The interpreter's lock is let go for half a megabyte at a time
and held for microseconds in between: a thread that takes it often, and gives it back for no longer than another needs to wake
up, would keep the owner waiting much longer than it works itself.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from sarp_cluster.core.posting_run cimport CHUNK_BYTES, PostingRun
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.storage cimport crc32c as c

from sarp_cluster.errors import InvariantViolationError

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int fd, void* to, size_t length, long offset)

cdef uint64_t NOTHING = ~<uint64_t>0


cdef class RowMerge:
    """The rows of several sources, newest source first, in the order of their slots: of each slot the newest."""

    def __cinit__(self):
        memset(self.source, 0, sizeof(self.source))
        self.keep = []
        self.failed = -1

    def __dealloc__(self):
        cdef int i
        for i in range(self.sources):
            free(self.source[i].memory)

    cdef RowSource* add(self, object keep) except NULL:
        """The next older source."""
        cdef RowSource* source
        if self.sources == SOURCES_MAX:
            raise InvariantViolationError(f"a merge of the rows of more than {SOURCES_MAX} runs")
        source = &self.source[self.sources]
        source.descriptor = -1
        self.head[self.sources] = NOTHING
        self.keep.append(keep)
        self.sources += 1
        return source

    def add_memory(self, const uint32_t[::1] slots, const uint8_t[::1] rows):
        """Rows in memory, older than all that were added."""
        cdef RowSource* source
        if rows.shape[0] != slots.shape[0] * <Py_ssize_t>sizeof(SegmentRow):
            raise ValueError(f"{rows.shape[0]} bytes for {slots.shape[0]} rows")
        source = self.add((slots, rows))
        if slots.shape[0]:
            source.slot = &slots[0]
            source.row = &rows[0]
            source.count = slots.shape[0]
            self.head[self.sources - 1] = slots[0]

    def add_file(self, file, int descriptor, uint64_t offset, const uint32_t[::1] entries, const uint32_t[::1] checksums):
        """The rows of a run file, older than all that were added: its chunks of rows stand from `offset` on.

        It is read chunk by chunk. What cannot be read is an error of the packer: file.row_failure(chunk, errno), with 0 as
        errno for a chunk that does not verify.
        """
        cdef RowSource* source
        if entries.shape[0] != 2 * checksums.shape[0]:
            raise ValueError(f"{checksums.shape[0]} checksums for {entries.shape[0] // 2} chunks")
        source = self.add((file, entries, checksums))
        source.memory = <uint8_t*>malloc(CHUNK_BYTES)
        if source.memory == NULL:
            raise MemoryError("merge of rows")
        source.slot = <const uint32_t*>source.memory
        source.row = source.memory + ROWS_AT
        source.descriptor = descriptor
        source.offset = offset
        source.chunks = <uint32_t>checksums.shape[0]
        if source.chunks:
            source.size = &entries[1]
            source.checksum = &checksums[0]
            self.head[self.sources - 1] = 0  # `fill` reads its first chunk

    cdef int advance(self, int number) noexcept nogil:
        """A source is at its next row: sets its head. -1 if that could not be read."""
        cdef RowSource* source = &self.source[number]
        cdef size_t done
        cdef ssize_t got
        while source.at == source.count:
            if source.chunk == source.chunks:
                self.head[number] = NOTHING
                return 0
            done = 0
            self.error = 0
            while done < CHUNK_BYTES:
                got = pread(
                    source.descriptor, source.memory + done, CHUNK_BYTES - done,
                    source.offset + <uint64_t>source.chunk * CHUNK_BYTES + done,
                )
                if got < 0 and errno == EINTR:
                    continue
                if got < 0:
                    self.error = errno
                if got <= 0:
                    break
                done += got
            source.at = 0
            source.count = source.size[2 * source.chunk]
            if done < CHUNK_BYTES or source.count > CHUNK_ROWS or (
                c.crc32c(0, source.memory, CHUNK_BYTES) != source.checksum[source.chunk]
            ):
                source.count = 0
                self.failed = number
                return -1
            source.chunk += 1
        self.head[number] = source.slot[source.at]
        return 0

    cdef int fill(self, uint8_t* to) noexcept nogil:
        """Move rows into a chunk. Returns how many; 0: there are no more. -1 if one could not be read."""
        cdef uint32_t* slot = <uint32_t*>to
        cdef uint8_t* row = to + ROWS_AT
        cdef int count = 0
        cdef int i, newest
        cdef uint64_t least
        cdef RowSource* source
        for i in range(self.sources):
            if self.source[i].count == 0 and self.head[i] != NOTHING and self.advance(i) < 0:
                return -1
        memset(to, 0, CHUNK_BYTES)
        while count < CHUNK_ROWS:
            least = NOTHING
            newest = 0
            for i in range(self.sources):
                if self.head[i] < least:
                    least = self.head[i]
                    newest = i
            if least == NOTHING:
                break
            source = &self.source[newest]
            slot[count] = <uint32_t>least
            memcpy(row + count * sizeof(SegmentRow), source.row + source.at * sizeof(SegmentRow), sizeof(SegmentRow))
            count += 1
            for i in range(newest, self.sources):
                if self.head[i] == least:
                    self.source[i].at += 1
                    if self.advance(i) < 0:
                        return -1
        return count


cdef class RunPacker:
    """Packs some chunks at a time: `data` has their bytes until the next are packed."""

    def __cinit__(self):
        self.memory = <uint8_t*>malloc(PACKED_CHUNKS * CHUNK_BYTES)
        if self.memory == NULL:
            raise MemoryError("run file")

    def __dealloc__(self):
        free(self.memory)

    def postings(self, PostingRun run, uint32_t first):
        """Pack chunks of a run from `first` on, which are in memory. Returns how many; 0: there are no more."""
        cdef int i
        cdef uint8_t* to
        self.chunks = <int>min(run.c.chunks - min(first, run.c.chunks), <uint32_t>PACKED_CHUNKS)
        for i in range(self.chunks):
            if run.c.leaf[first + i].unloaded:
                raise InvariantViolationError(f"chunk {first + i} of run {run.number} is not in memory")
        with nogil:
            for i in range(self.chunks):
                to = self.memory + i * CHUNK_BYTES
                memcpy(to, run.c.leaf[first + i].key, CHUNK_BYTES)
                self.checksum[i] = c.crc32c(0, to, CHUNK_BYTES)
        return self.chunks

    def rows(self, RowMerge merge):
        """Pack the next rows. Returns the number of chunks; 0: there are no more rows."""
        cdef int count = 0
        cdef uint8_t* to
        self.chunks = 0
        with nogil:
            while self.chunks < PACKED_CHUNKS:
                to = self.memory + self.chunks * CHUNK_BYTES
                count = merge.fill(to)
                if count <= 0:
                    break
                self.entry[2 * self.chunks] = (<uint32_t*>to)[0]
                self.entry[2 * self.chunks + 1] = count
                self.checksum[self.chunks] = c.crc32c(0, to, CHUNK_BYTES)
                self.chunks += 1
        if count < 0:
            raise merge.keep[merge.failed][0].row_failure(merge.source[merge.failed].chunk, merge.error)
        return self.chunks

    @property
    def data(self):
        """The bytes of the chunks."""
        return PyMemoryView_FromMemory(<char*>self.memory, self.chunks * CHUNK_BYTES, 0x100)

    @property
    def checksums(self):
        """Their checksums, 4 bytes each."""
        return PyBytes_FromStringAndSize(<char*>self.checksum, self.chunks * sizeof(uint32_t))

    @property
    def entries(self):
        """Of chunks of rows: the first slot and the number of rows, 4 bytes each."""
        return PyBytes_FromStringAndSize(<char*>self.entry, 2 * self.chunks * sizeof(uint32_t))
