# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""An immutable sorted set of postings: an older level of the routing directory, as it stands on disk (design §5).

A run is a sequence of chunks of 64 KiB, each four columns (key, high, low, slot) of up to 2,340 postings. Of a chunk that is
not in memory only the first posting is known, from the run's index. Looking for a posting behind it notes the chunk as
missed and answers as if the chunk ended there: who asked has to look at `missed`, have the chunks loaded, and ask again.
That keeps the core free of I/O, and a recovered index answers before its directory was read.

Keys are bits of permuted block IDs, hence uniform: a search begins where the key would stand if the keys were evenly
spread and gallops from there, a few cache lines in place of a binary search's dozen. Long lists cost it more steps only.

Invariants (checked by fault(), which RoutingDirectory.validate calls):
  R1  postings ascend strictly, within a chunk and from one to the next;
  R2  every chunk but the last is full, and none is empty;
  R3  a chunk's first posting is what the index says.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from sarp_cluster.core.posting_tree cimport Cursor, Leaf, MissedChunks, Posting, compare_postings, note_missed

cdef enum:
    HIGH_AT = 8 * CHUNK_POSTINGS
    LOW_AT = 16 * CHUNK_POSTINGS
    SLOT_AT = 24 * CHUNK_POSTINGS

cdef packed struct IndexEntry:  # 32 bytes a chunk
    uint64_t key
    uint64_t high
    uint64_t low
    uint32_t slot
    uint32_t size


cdef extern from *:
    """
    static inline unsigned long long sarp_scale(unsigned long long a, unsigned long long b) {
        return (unsigned long long)(((unsigned __int128)a * b) >> 64);
    }
    static inline unsigned long long sarp_between(unsigned long long part, unsigned long long whole,
                                                  unsigned long long size) {
        return (unsigned long long)((unsigned __int128)part * size / whole);
    }
    """
    uint64_t sarp_scale(uint64_t a, uint64_t b) noexcept nogil
    uint64_t sarp_between(uint64_t part, uint64_t whole, uint64_t size) noexcept nogil


cdef inline bint chunk_after(const Run* run, int64_t chunk, const Posting* wanted) noexcept nogil:
    """Does a chunk begin behind the posting that is wanted?"""
    cdef const Posting* first = &run.first[chunk]
    return compare_postings(
        first.key, first.high, first.low, first.slot, wanted.key, wanted.high, wanted.low, wanted.slot
    ) > 0


cdef inline bint posting_before(const Leaf* leaf, int64_t index, const Posting* wanted) noexcept nogil:
    """Does a posting of a chunk stand before the one that is wanted?"""
    if leaf.key[index] != wanted.key:
        return leaf.key[index] < wanted.key
    return compare_postings(
        wanted.key, leaf.high[index], leaf.low[index], leaf.slot[index], wanted.key, wanted.high, wanted.low, wanted.slot
    ) < 0


cdef inline int64_t find_chunk(const Run* run, const Posting* wanted) noexcept nogil:
    """The last chunk that does not begin behind the posting; -1 if all do."""
    cdef int64_t begin = -1              # does not begin behind it
    cdef int64_t end = run.chunks        # begins behind it
    cdef int64_t probe = <int64_t>sarp_scale(wanted.key, run.chunks)
    cdef int64_t step = 1
    while end - begin > 1:
        if chunk_after(run, probe, wanted):
            end = probe
            probe -= step
        else:
            begin = probe
            probe += step
        step *= 2
        if probe <= begin or probe >= end:
            break
    while end - begin > 1:
        probe = begin + (end - begin) // 2
        if chunk_after(run, probe, wanted):
            end = probe
        else:
            begin = probe
    return begin


cdef Cursor run_seek(const Run* run, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil:
    """The first posting that is not less than (key, high, low, slot)."""
    cdef Posting wanted = Posting(key, high, low, slot)
    cdef Cursor cursor
    cdef Leaf* leaf
    cdef int64_t chunk, begin, end, probe, step
    cdef uint64_t from_key, to_key
    cursor.leaf = NULL
    cursor.index = 0
    if run.chunks == 0:
        return cursor
    chunk = find_chunk(run, &wanted)
    if chunk < 0:
        cursor.leaf = &run.leaf[0]
        return cursor
    leaf = &run.leaf[chunk]
    if leaf.unloaded:
        if compare_postings(
            run.first[chunk].key, run.first[chunk].high, run.first[chunk].low, run.first[chunk].slot, key, high, low, slot
        ) == 0:
            cursor.leaf = leaf
            return cursor
        note_missed(leaf)
        cursor.leaf = leaf.next
        return cursor
    begin = -1                           # stands before what is wanted
    end = leaf.count                     # does not
    from_key = run.first[chunk].key
    to_key = run.first[chunk + 1].key if chunk + 1 < run.chunks else ~<uint64_t>0
    probe = leaf.count // 2
    if to_key > from_key and key >= from_key:
        probe = <int64_t>sarp_between(key - from_key, to_key - from_key, leaf.count)
        if probe >= leaf.count:
            probe = leaf.count - 1
    step = 4
    while end - begin > 1:
        if posting_before(leaf, probe, &wanted):
            begin = probe
            probe += step
        else:
            end = probe
            probe -= step
        step *= 2
        if probe <= begin or probe >= end:
            break
    while end - begin > 1:
        probe = begin + (end - begin) // 2
        if posting_before(leaf, probe, &wanted):
            begin = probe
        else:
            end = probe
    cursor.leaf = leaf
    cursor.index = <int>end
    if end == leaf.count:
        cursor.leaf = leaf.next
        cursor.index = 0
    return cursor


cdef class PostingRun:
    """One run: built by appending in order, or known by its index and loaded chunk by chunk."""

    def __cinit__(self, uint32_t number=0):
        memset(&self.c, 0, sizeof(Run))
        self.number = number

    def __dealloc__(self):
        cdef uint32_t i
        with nogil:  # it is some time's work, which a helper thread does beside the owner
            for i in range(self.c.chunks):
                if not self.c.leaf[i].unloaded:
                    free(self.c.leaf[i].key)
            free(self.c.leaf)
            free(self.c.first)
            free(self.c.size)

    # --- building ----------------------------------------------------------------------------------------------------

    cdef void set_columns(self, uint32_t chunk, void* data) noexcept nogil:
        cdef Leaf* leaf = &self.c.leaf[chunk]
        leaf.key = <uint64_t*>data
        leaf.high = <uint64_t*>(<uint8_t*>data + HIGH_AT)
        leaf.low = <uint64_t*>(<uint8_t*>data + LOW_AT)
        leaf.slot = <uint32_t*>(<uint8_t*>data + SLOT_AT)

    cdef int begin_chunk(self) except -1 nogil:
        cdef uint32_t capacity
        cdef void* memory
        if self.c.chunks == self.capacity:
            capacity = max(4, 2 * self.capacity)
            memory = realloc(self.c.leaf, capacity * sizeof(Leaf))
            if memory != NULL:
                self.c.leaf = <Leaf*>memory
                memory = realloc(self.c.first, capacity * sizeof(Posting))
            if memory != NULL:
                self.c.first = <Posting*>memory
                memory = realloc(self.c.size, capacity * sizeof(uint32_t))
            if memory == NULL:
                with gil:
                    raise MemoryError("posting run")
            self.c.size = <uint32_t*>memory
            self.capacity = capacity
        memory = calloc(1, CHUNK_BYTES)
        if memory == NULL:
            with gil:
                raise MemoryError("posting run")
        memset(&self.c.leaf[self.c.chunks], 0, sizeof(Leaf))
        self.set_columns(self.c.chunks, memory)
        self.c.leaf[self.c.chunks].run = self.number
        self.c.leaf[self.c.chunks].chunk = self.c.chunks
        self.c.size[self.c.chunks] = 0
        self.c.chunks += 1
        return 0

    cdef int append(self, const Posting* posting) except -1 nogil:
        """Append a posting behind all others. `link` follows the last."""
        cdef Leaf* leaf
        if self.c.chunks == 0 or self.c.size[self.c.chunks - 1] == CHUNK_POSTINGS:
            self.begin_chunk()
            self.c.first[self.c.chunks - 1] = posting[0]
        leaf = &self.c.leaf[self.c.chunks - 1]
        leaf.key[leaf.count] = posting.key
        leaf.high[leaf.count] = posting.high
        leaf.low[leaf.count] = posting.low
        leaf.slot[leaf.count] = posting.slot
        leaf.count += 1
        self.c.size[self.c.chunks - 1] += 1
        self.c.postings += 1
        return 0

    cdef void link(self) noexcept nogil:
        """Chain the chunks, once there are no more to come."""
        cdef uint32_t i
        for i in range(self.c.chunks):
            self.c.leaf[i].previous = &self.c.leaf[i - 1] if i > 0 else NULL
            self.c.leaf[i].next = &self.c.leaf[i + 1] if i + 1 < self.c.chunks else NULL

    cdef void attach(self, MissedChunks* missed) noexcept:
        """Where to note chunks that were wanted and are not in memory."""
        cdef uint32_t i
        for i in range(self.c.chunks):
            self.c.leaf[i].missed = missed

    # --- the run on disk -----------------------------------------------------------------------------------------------

    @property
    def chunks(self):
        """Chunks of 64 KiB."""
        return self.c.chunks

    @property
    def postings(self):
        """Records: postings, removals and headers."""
        return self.c.postings

    @property
    def resident_bytes(self):
        """Bytes in memory."""
        return (
            <size_t>(self.c.chunks - self.unloaded) * CHUNK_BYTES
            + self.capacity * (sizeof(Leaf) + sizeof(Posting) + sizeof(uint32_t))
        )

    def index(self):
        """First posting and size of each chunk, 32 bytes a chunk: what `lazy` needs."""
        cdef bytes packed = PyBytes_FromStringAndSize(NULL, self.c.chunks * sizeof(IndexEntry))
        cdef IndexEntry* entry = <IndexEntry*>PyBytes_AS_STRING(packed)
        cdef uint32_t i
        with nogil:
            for i in range(self.c.chunks):
                entry[i] = IndexEntry(
                    self.c.first[i].key, self.c.first[i].high, self.c.first[i].low, self.c.first[i].slot, self.c.size[i]
                )
        return packed

    @staticmethod
    def lazy(uint32_t number, bytes index):
        """A run of which no chunk is in memory. Raises ValueError for an index that makes no sense."""
        cdef PostingRun run = PostingRun(number)
        cdef const IndexEntry* entry = <const IndexEntry*>PyBytes_AS_STRING(index)
        cdef uint32_t chunks = <uint32_t>(len(index) // sizeof(IndexEntry))
        cdef uint32_t i
        if len(index) % sizeof(IndexEntry):
            raise ValueError("the index of a run has an odd length")
        if chunks == 0:
            return run
        run.c.leaf = <Leaf*>calloc(chunks, sizeof(Leaf))
        run.c.first = <Posting*>calloc(chunks, sizeof(Posting))
        run.c.size = <uint32_t*>calloc(chunks, sizeof(uint32_t))
        if run.c.leaf == NULL or run.c.first == NULL or run.c.size == NULL:
            raise MemoryError("posting run")
        run.capacity = chunks
        for i in range(chunks):
            if entry[i].size == 0 or entry[i].size > CHUNK_POSTINGS or (i + 1 < chunks and entry[i].size != CHUNK_POSTINGS):
                raise ValueError("the index of a run has a chunk of a wrong size")
            run.c.first[i] = Posting(entry[i].key, entry[i].high, entry[i].low, entry[i].slot)
            run.c.size[i] = entry[i].size
            run.c.postings += entry[i].size
            run.c.leaf[i].key = &run.c.first[i].key
            run.c.leaf[i].high = &run.c.first[i].high
            run.c.leaf[i].low = &run.c.first[i].low
            run.c.leaf[i].slot = &run.c.first[i].slot
            run.c.leaf[i].count = 1
            run.c.leaf[i].run = number
            run.c.leaf[i].chunk = i
            run.c.leaf[i].unloaded = 1
        run.c.chunks = chunks
        run.unloaded = chunks
        run.link()
        return run

    def chunk(self, uint32_t chunk):
        """The bytes of a chunk in memory, for writing it out."""
        if chunk >= self.c.chunks or self.c.leaf[chunk].unloaded:
            raise IndexError("the chunk is not in memory")
        return PyMemoryView_FromMemory(<char*>self.c.leaf[chunk].key, CHUNK_BYTES, 0x100)

    def loaded(self, uint32_t chunk):
        """Is a chunk in memory?"""
        return chunk >= self.c.chunks or not self.c.leaf[chunk].unloaded

    def next_unloaded(self, uint32_t begin):
        """The first chunk from `begin` on that is not in memory; -1: none is."""
        cdef uint32_t chunk
        for chunk in range(begin, self.c.chunks):
            if self.c.leaf[chunk].unloaded:
                return chunk
        return -1

    def install(self, uint32_t chunk, const uint8_t[::1] data):
        """Take the bytes of a chunk, whose checksum was found right. Raises ValueError if they are not this chunk's."""
        cdef Leaf* leaf
        cdef void* memory
        if chunk >= self.c.chunks or data.shape[0] != CHUNK_BYTES:
            raise ValueError("no such chunk")
        leaf = &self.c.leaf[chunk]
        if not leaf.unloaded:
            return
        memory = malloc(CHUNK_BYTES)
        if memory == NULL:
            raise MemoryError("posting run")
        memcpy(memory, &data[0], CHUNK_BYTES)
        if (<uint64_t*>memory)[0] != self.c.first[chunk].key or (
            <uint32_t*>(<uint8_t*>memory + SLOT_AT)
        )[0] != self.c.first[chunk].slot:
            free(memory)
            raise ValueError("the chunk does not begin as the index says")
        self.set_columns(chunk, memory)
        leaf.count = self.c.size[chunk]
        leaf.unloaded = 0
        self.unloaded -= 1

    # --- checks --------------------------------------------------------------------------------------------------------

    def fault(self):
        """The first violated invariant, or None. All chunks have to be in memory."""
        cdef uint32_t chunk
        cdef int i
        cdef Leaf* leaf
        cdef Posting last
        cdef size_t postings = 0
        for chunk in range(self.c.chunks):
            leaf = &self.c.leaf[chunk]
            if leaf.unloaded:
                return f"chunk {chunk} is not in memory"
            if leaf.count == 0 or (chunk + 1 < self.c.chunks and leaf.count != CHUNK_POSTINGS):
                return f"R2: chunk {chunk} has {leaf.count} postings"
            if compare_postings(
                leaf.key[0], leaf.high[0], leaf.low[0], leaf.slot[0],
                self.c.first[chunk].key, self.c.first[chunk].high, self.c.first[chunk].low, self.c.first[chunk].slot,
            ) != 0:
                return f"R3: chunk {chunk}"
            for i in range(leaf.count):
                if postings and compare_postings(
                    last.key, last.high, last.low, last.slot, leaf.key[i], leaf.high[i], leaf.low[i], leaf.slot[i]
                ) >= 0:
                    return f"R1: chunk {chunk}, posting {i}"
                last = Posting(leaf.key[i], leaf.high[i], leaf.low[i], leaf.slot[i])
                postings += 1
        return None
