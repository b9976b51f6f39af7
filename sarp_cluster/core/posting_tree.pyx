# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A sorted set of postings: one level of the routing directory.

A B+ tree ordered by (routing key, filter, slot). All postings of one key stand together, sorted by filter, so a posting
list is a range of the tree and the paper's search for the largest match potential is one descent. An insert costs
O(log n) whatever the length of its list and never moves more than one node, so growing has no long stop.

Invariants (checked by tree_validate, which RoutingDirectory.validate calls):
  T1  postings ascend strictly along the chain of leaves;
  T2  every posting lies within the separators above it;
  T3  counters of postings, leaves and inner nodes are exact.
Nodes are not merged when postings go: an overlay is short-lived, the next snapshot packs it into a run.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

cdef enum:
    HEIGHT_MAX = 16            # 32 ** 16 postings and more


cdef struct Inner:
    int count                  # children; separator 0 is never read
    uint32_t slot[NODE_CAPACITY]
    uint64_t key[NODE_CAPACITY]
    uint64_t high[NODE_CAPACITY]
    uint64_t low[NODE_CAPACITY]
    void* child[NODE_CAPACITY]


cdef Leaf* leaf_new() noexcept nogil:
    """An empty leaf without neighbours, or NULL."""
    cdef TreeLeaf* node = <TreeLeaf*>malloc(sizeof(TreeLeaf))
    if node == NULL:
        return NULL
    memset(&node.leaf, 0, sizeof(Leaf))
    node.leaf.key = node.key
    node.leaf.high = node.high
    node.leaf.low = node.low
    node.leaf.slot = node.slot
    return &node.leaf


cdef Tree* tree_new() except NULL:
    cdef Tree* tree = <Tree*>calloc(1, sizeof(Tree))
    if tree == NULL:
        raise MemoryError("posting tree")
    cdef Leaf* leaf = leaf_new()
    if leaf == NULL:
        free(tree)
        raise MemoryError("posting tree")
    tree.root = leaf
    tree.first = leaf
    tree.last = leaf
    tree.leaves = 1
    return tree


cdef void free_inner(void* node, int height) noexcept nogil:
    """Free the inner nodes of a subtree whose leaves are gone."""
    cdef Inner* inner = <Inner*>node
    cdef int i
    if height == 0:
        return
    for i in range(inner.count):
        free_inner(inner.child[i], height - 1)
    free(inner)


cdef void tree_free(Tree* tree) noexcept nogil:
    """Free a tree, or nothing."""
    cdef Leaf* leaf
    cdef Leaf* following
    if tree == NULL:
        return
    leaf = tree.first
    while leaf != NULL:
        following = leaf.next
        free(leaf)
        leaf = following
    free_inner(tree.root, tree.height)
    free(tree)


cdef size_t tree_bytes(const Tree* tree) noexcept nogil:
    return sizeof(Tree) + tree.leaves * sizeof(TreeLeaf) + tree.inners * sizeof(Inner)


cdef inline int leaf_lower_bound(const Leaf* leaf, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil:
    """Index of the first posting that is not less."""
    cdef int begin = 0
    cdef int size = leaf.count
    cdef int half, middle
    while size > 0:
        half = size >> 1
        middle = begin + half
        if leaf.key[middle] < key or (
            leaf.key[middle] == key
            and compare_postings(
                key, leaf.high[middle], leaf.low[middle], leaf.slot[middle], key, high, low, slot
            ) < 0
        ):
            begin = middle + 1
            size -= half + 1
        else:
            size = half
    return begin


cdef inline int inner_child(const Inner* inner, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil:
    """Index of the last child whose separator is not greater."""
    cdef int begin = 1
    cdef int size = inner.count - 1
    cdef int half, middle
    while size > 0:
        half = size >> 1
        middle = begin + half
        if inner.key[middle] < key or (
            inner.key[middle] == key
            and compare_postings(
                key, inner.high[middle], inner.low[middle], inner.slot[middle], key, high, low, slot
            ) <= 0
        ):
            begin = middle + 1
            size -= half + 1
        else:
            size = half
    return begin - 1


cdef Cursor tree_seek(const Tree* tree, uint64_t key, uint64_t high, uint64_t low, uint32_t slot) noexcept nogil:
    """The first posting that is not less than (key, high, low, slot)."""
    cdef void* node = tree.root
    cdef int height = tree.height
    cdef Cursor cursor
    while height > 0:
        node = (<Inner*>node).child[inner_child(<Inner*>node, key, high, low, slot)]
        height -= 1
    cursor.leaf = <Leaf*>node
    cursor.index = leaf_lower_bound(cursor.leaf, key, high, low, slot)
    while cursor.leaf != NULL and cursor.index >= cursor.leaf.count:
        cursor.leaf = cursor.leaf.next
        cursor.index = 0
    return cursor


cdef Cursor tree_find(const Tree* tree, const Posting* posting) noexcept nogil:
    """The posting itself, or a cursor without a leaf."""
    cdef Cursor cursor = tree_seek(tree, posting.key, posting.high, posting.low, posting.slot)
    if cursor.leaf != NULL and compare_postings(
        cursor.leaf.key[cursor.index], cursor.leaf.high[cursor.index], cursor.leaf.low[cursor.index],
        cursor.leaf.slot[cursor.index], posting.key, posting.high, posting.low, posting.slot,
    ) != 0:
        cursor.leaf = NULL
    return cursor


cdef inline void leaf_put(Leaf* leaf, int index, const Posting* posting) noexcept nogil:
    cdef int tail = leaf.count - index
    if tail > 0:
        memmove(&leaf.key[index + 1], &leaf.key[index], tail * sizeof(uint64_t))
        memmove(&leaf.high[index + 1], &leaf.high[index], tail * sizeof(uint64_t))
        memmove(&leaf.low[index + 1], &leaf.low[index], tail * sizeof(uint64_t))
        memmove(&leaf.slot[index + 1], &leaf.slot[index], tail * sizeof(uint32_t))
    leaf.key[index] = posting.key
    leaf.high[index] = posting.high
    leaf.low[index] = posting.low
    leaf.slot[index] = posting.slot
    leaf.count += 1


cdef Leaf* leaf_split(Tree* tree, Leaf* leaf, int keep) except NULL nogil:
    """Move the postings from `keep` on to a new right neighbour."""
    cdef Leaf* right = leaf_new()
    cdef int moved = leaf.count - keep
    if right == NULL:
        with gil:
            raise MemoryError("posting tree")
    memcpy(right.key, &leaf.key[keep], moved * sizeof(uint64_t))
    memcpy(right.high, &leaf.high[keep], moved * sizeof(uint64_t))
    memcpy(right.low, &leaf.low[keep], moved * sizeof(uint64_t))
    memcpy(right.slot, &leaf.slot[keep], moved * sizeof(uint32_t))
    right.count = moved
    leaf.count = keep
    right.previous = leaf
    right.next = leaf.next
    if right.next != NULL:
        right.next.previous = right
    else:
        tree.last = right
    leaf.next = right
    tree.leaves += 1
    return right


cdef inline void inner_put(Inner* inner, int index, const Posting* separator, void* child) noexcept nogil:
    cdef int tail = inner.count - index
    if tail > 0:
        memmove(&inner.key[index + 1], &inner.key[index], tail * sizeof(uint64_t))
        memmove(&inner.high[index + 1], &inner.high[index], tail * sizeof(uint64_t))
        memmove(&inner.low[index + 1], &inner.low[index], tail * sizeof(uint64_t))
        memmove(&inner.slot[index + 1], &inner.slot[index], tail * sizeof(uint32_t))
        memmove(&inner.child[index + 1], &inner.child[index], tail * sizeof(void*))
    inner.key[index] = separator.key
    inner.high[index] = separator.high
    inner.low[index] = separator.low
    inner.slot[index] = separator.slot & ~(<uint32_t>REMOVED)
    inner.child[index] = child
    inner.count += 1


cdef int link_right(Tree* tree, Inner** path, int* at, int depth, Posting* separator, void* right) except -1 nogil:
    """Enter a new right neighbour in the inner nodes above it, splitting them where they are full."""
    cdef Inner* inner
    cdef Inner* sibling
    cdef Posting middle
    cdef int keep, moved, index
    while depth > 0:
        depth -= 1
        inner = path[depth]
        index = at[depth] + 1
        if inner.count < NODE_CAPACITY:
            inner_put(inner, index, separator, right)
            return 0
        sibling = <Inner*>malloc(sizeof(Inner))
        if sibling == NULL:
            with gil:
                raise MemoryError("posting tree")
        # Appends leave the left node full: a bulk load packs its nodes.
        keep = NODE_CAPACITY - 1 if index == NODE_CAPACITY else NODE_CAPACITY // 2
        moved = NODE_CAPACITY - keep
        memcpy(sibling.key, &inner.key[keep], moved * sizeof(uint64_t))
        memcpy(sibling.high, &inner.high[keep], moved * sizeof(uint64_t))
        memcpy(sibling.low, &inner.low[keep], moved * sizeof(uint64_t))
        memcpy(sibling.slot, &inner.slot[keep], moved * sizeof(uint32_t))
        memcpy(sibling.child, &inner.child[keep], moved * sizeof(void*))
        sibling.count = moved
        inner.count = keep
        tree.inners += 1
        middle.key = sibling.key[0]
        middle.high = sibling.high[0]
        middle.low = sibling.low[0]
        middle.slot = sibling.slot[0]
        if index > keep:
            inner_put(sibling, index - keep, separator, right)
        else:
            inner_put(inner, index, separator, right)
        separator[0] = middle
        right = sibling
    inner = <Inner*>malloc(sizeof(Inner))
    if inner == NULL:
        with gil:
            raise MemoryError("posting tree")
    inner.count = 1
    inner.child[0] = tree.root
    inner.key[0] = 0
    inner.high[0] = 0
    inner.low[0] = 0
    inner.slot[0] = 0
    inner_put(inner, 1, separator, right)
    tree.root = inner
    tree.height += 1
    tree.inners += 1
    return 0


cdef int tree_insert(Tree* tree, const Posting* posting) except -1 nogil:
    """Insert, or overwrite the mark of the same posting. 1 if it was new."""
    cdef Inner* path[HEIGHT_MAX]
    cdef int at[HEIGHT_MAX]
    cdef void* node = tree.root
    cdef int depth = 0
    cdef int index, keep
    cdef Leaf* leaf
    cdef Leaf* right
    cdef Posting separator
    while depth < tree.height:
        path[depth] = <Inner*>node
        at[depth] = inner_child(path[depth], posting.key, posting.high, posting.low, posting.slot)
        node = path[depth].child[at[depth]]
        depth += 1
    leaf = <Leaf*>node
    index = leaf_lower_bound(leaf, posting.key, posting.high, posting.low, posting.slot)
    if index < leaf.count and compare_postings(
        leaf.key[index], leaf.high[index], leaf.low[index], leaf.slot[index],
        posting.key, posting.high, posting.low, posting.slot,
    ) == 0:
        leaf.slot[index] = posting.slot
        return 0
    if leaf.count == NODE_CAPACITY:
        keep = NODE_CAPACITY if index == NODE_CAPACITY and leaf.next == NULL else NODE_CAPACITY // 2
        right = leaf_split(tree, leaf, keep)
        if keep == NODE_CAPACITY:
            separator = posting[0]
            leaf_put(right, 0, posting)
        else:
            separator.key = right.key[0]
            separator.high = right.high[0]
            separator.low = right.low[0]
            separator.slot = right.slot[0]
            if index > keep:
                leaf_put(right, index - keep, posting)
            else:
                leaf_put(leaf, index, posting)
        link_right(tree, path, at, depth, &separator, right)
    else:
        leaf_put(leaf, index, posting)
    tree.postings += 1
    return 1


cdef void tree_erase(Tree* tree, const Posting* posting) noexcept nogil:
    """Take a posting out; it has to be there."""
    cdef Cursor cursor = tree_find(tree, posting)
    cdef Leaf* leaf = cursor.leaf
    cdef int index = cursor.index
    cdef int tail
    if leaf == NULL:
        return
    tail = leaf.count - index - 1
    if tail > 0:
        memmove(&leaf.key[index], &leaf.key[index + 1], tail * sizeof(uint64_t))
        memmove(&leaf.high[index], &leaf.high[index + 1], tail * sizeof(uint64_t))
        memmove(&leaf.low[index], &leaf.low[index + 1], tail * sizeof(uint64_t))
        memmove(&leaf.slot[index], &leaf.slot[index + 1], tail * sizeof(uint32_t))
    leaf.count -= 1
    tree.postings -= 1


cdef str node_fault(void* node, int height, const Posting* low, const Posting* high):
    """What is wrong below `node`, whose postings have to lie in [low, high); None bounds are NULL."""
    cdef Inner* inner
    cdef Leaf* leaf
    cdef int i
    cdef Posting begin, end
    cdef const Posting* below
    cdef const Posting* above
    if height == 0:
        leaf = <Leaf*>node
        for i in range(leaf.count):
            if low != NULL and compare_postings(leaf.key[i], leaf.high[i], leaf.low[i], leaf.slot[i],
                                                low.key, low.high, low.low, low.slot) < 0:
                return "T2: a posting lies before its separator"
            if high != NULL and compare_postings(leaf.key[i], leaf.high[i], leaf.low[i], leaf.slot[i],
                                                 high.key, high.high, high.low, high.slot) >= 0:
                return "T2: a posting lies behind its separator"
        return None
    inner = <Inner*>node
    for i in range(inner.count):
        begin = Posting(inner.key[i], inner.high[i], inner.low[i], inner.slot[i])
        if i + 1 < inner.count:
            end = Posting(inner.key[i + 1], inner.high[i + 1], inner.low[i + 1], inner.slot[i + 1])
        below = low
        if i > 0:
            below = &begin
        above = high
        if i + 1 < inner.count:
            above = &end
        fault = node_fault(inner.child[i], height - 1, below, above)
        if fault is not None:
            return fault
    return None


cdef str tree_fault(const Tree* tree):
    """The first violated invariant, or None."""
    cdef Leaf* leaf = tree.first
    cdef Posting last
    cdef bint any_before = False
    cdef size_t postings = 0, leaves = 0
    cdef int i
    while leaf != NULL:
        leaves += 1
        for i in range(leaf.count):
            if any_before and compare_postings(last.key, last.high, last.low, last.slot, leaf.key[i], leaf.high[i],
                                               leaf.low[i], leaf.slot[i]) >= 0:
                return "T1: postings do not ascend"
            last = Posting(leaf.key[i], leaf.high[i], leaf.low[i], leaf.slot[i])
            any_before = True
            postings += 1
        leaf = leaf.next
    if postings != tree.postings or leaves != tree.leaves:
        return f"T3: {postings} postings and {leaves} leaves, counted {tree.postings} and {tree.leaves}"
    return node_fault(tree.root, tree.height, NULL, NULL)
