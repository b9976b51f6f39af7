from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.posting_tree cimport Cursor, Leaf, MissedChunks, Posting, Tree, tree_seek

cdef enum:
    CHUNK_BYTES = 65536
    CHUNK_POSTINGS = 2340      # of 28 bytes; 16 bytes of a chunk are left over


cdef struct Run:
    Leaf* leaf                 # one a chunk
    Posting* first             # each chunk's first posting
    uint32_t* size             # postings in each chunk
    uint32_t chunks
    size_t postings


cdef struct Level:             # of the directory: a tree, or else a run
    Tree* tree
    Run* run


cdef Cursor run_seek(const Run* run, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil


cdef inline Cursor level_seek(const Level* level, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil:
    """The first posting that is not less than (key, high, low, slot)."""
    if level.tree != NULL:
        return tree_seek(level.tree, key, high, low, slot)
    return run_seek(level.run, key, high, low, slot)


cdef inline Cursor level_begin(const Level* level) noexcept nogil:
    """The first posting of all."""
    cdef Cursor cursor
    cursor.leaf = level.tree.first if level.tree != NULL else level.run.leaf
    cursor.index = 0
    while cursor.leaf != NULL and cursor.leaf.count == 0:
        cursor.leaf = cursor.leaf.next
    return cursor


cdef inline Leaf* level_last(const Level* level) noexcept nogil:
    """The last leaf; NULL in an empty run."""
    if level.tree != NULL:
        return level.tree.last
    return &level.run.leaf[level.run.chunks - 1] if level.run.chunks else NULL


cdef class PostingRun:
    cdef Run c
    cdef uint32_t capacity
    cdef readonly uint32_t number
    cdef readonly uint32_t unloaded

    cdef int append(self, const Posting* posting) except -1 nogil
    cdef void link(self) noexcept nogil
    cdef void attach(self, MissedChunks* missed) noexcept
    cdef int begin_chunk(self) except -1 nogil
    cdef void set_columns(self, uint32_t chunk, void* data) noexcept nogil
