from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    NODE_CAPACITY = 64
    FIRST_SLOT = 4096          # slots below it are headers, see routing_directory
    REMOVED = 0x80000000u      # marks a posting of a lower level as removed
    MISSED_MAX = 64


cdef struct Posting:
    uint64_t key
    uint64_t high
    uint64_t low
    uint32_t slot


cdef struct MissedChunks:      # chunks of runs that are not in memory and were wanted (posting_run)
    int count
    uint32_t run[MISSED_MAX]
    uint32_t chunk[MISSED_MAX]


cdef struct Leaf:              # a node of a tree, or a chunk of a run: what a cursor walks over
    Leaf* next
    Leaf* previous
    uint64_t* key
    uint64_t* high
    uint64_t* low
    uint32_t* slot
    int count
    uint32_t run               # of a chunk: its run and its place in it
    uint32_t chunk
    int unloaded               # only the chunk's first posting is known
    MissedChunks* missed       # where to note that more was wanted


cdef struct TreeLeaf:
    Leaf leaf
    uint32_t slot[NODE_CAPACITY]
    uint64_t key[NODE_CAPACITY]
    uint64_t high[NODE_CAPACITY]
    uint64_t low[NODE_CAPACITY]


cdef struct Cursor:
    Leaf* leaf                 # NULL: past either end
    int index


cdef struct Tree:
    void* root
    int height                 # 0: the root is a leaf
    Leaf* first
    Leaf* last
    size_t postings
    size_t leaves
    size_t inners


cdef Tree* tree_new() except NULL
cdef void tree_free(Tree* tree) noexcept nogil
cdef Cursor tree_seek(const Tree* tree, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil
cdef Cursor tree_find(const Tree* tree, const Posting* posting) noexcept nogil
cdef int tree_insert(Tree* tree, const Posting* posting) except -1 nogil
cdef void tree_erase(Tree* tree, const Posting* posting) noexcept nogil
cdef size_t tree_bytes(const Tree* tree) noexcept nogil
cdef str tree_fault(const Tree* tree)


cdef inline int compare_postings(
    uint64_t a_key, uint64_t a_high, uint64_t a_low, uint32_t a_slot,
    uint64_t b_key, uint64_t b_high, uint64_t b_low, uint32_t b_slot,
) noexcept nogil:
    """Order by key, filter, slot; the mark of a removal does not count."""
    if a_key != b_key:
        return -1 if a_key < b_key else 1
    if a_high != b_high:
        return -1 if a_high < b_high else 1
    if a_low != b_low:
        return -1 if a_low < b_low else 1
    a_slot &= ~(<uint32_t>REMOVED)
    b_slot &= ~(<uint32_t>REMOVED)
    if a_slot != b_slot:
        return -1 if a_slot < b_slot else 1
    return 0


cdef inline void cursor_posting(Cursor cursor, Posting* out) noexcept nogil:
    out.key = cursor.leaf.key[cursor.index]
    out.high = cursor.leaf.high[cursor.index]
    out.low = cursor.leaf.low[cursor.index]
    out.slot = cursor.leaf.slot[cursor.index]


cdef inline void note_missed(Leaf* leaf) noexcept nogil:
    """More of a chunk is wanted than is in memory: whoever asked has to ask again once it was loaded."""
    cdef MissedChunks* missed = leaf.missed
    cdef int i
    for i in range(missed.count):
        if missed.run[i] == leaf.run and missed.chunk[i] == leaf.chunk:
            return
    if missed.count < MISSED_MAX:
        missed.run[missed.count] = leaf.run
        missed.chunk[missed.count] = leaf.chunk
        missed.count += 1


cdef inline void cursor_next(Cursor* cursor) noexcept nogil:
    if cursor.leaf.unloaded:
        note_missed(cursor.leaf)
    cursor.index += 1
    while cursor.leaf != NULL and cursor.index >= cursor.leaf.count:
        cursor.leaf = cursor.leaf.next
        cursor.index = 0


cdef inline void cursor_previous(Cursor* cursor) noexcept nogil:
    if cursor.leaf.unloaded and cursor.index > 0:
        note_missed(cursor.leaf)
    cursor.index -= 1
    while cursor.leaf != NULL and cursor.index < 0:
        cursor.leaf = cursor.leaf.previous
        if cursor.leaf != NULL:
            if cursor.leaf.unloaded:
                note_missed(cursor.leaf)
            cursor.index = cursor.leaf.count - 1
