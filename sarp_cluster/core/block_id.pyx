# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=False
"""Block IDs: from tokens to wire IDs, from wire IDs to the internal IDs of a namespace.

A *wire* ID is what the outside world calls a block; it is equal for equal tokens everywhere. An *internal* ID is its
image under the namespace's key: routing, filters and records use only these, so that no tenant can find out, or choose
on purpose, where another tenant's blocks lie. The permutation is a keyed mix, not a cipher: internal IDs must not be
shown to anyone who may not know the key.

All IDs are u64 little-endian, packed.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, TooLargeError

cdef uint64_t HASH_SEED = 1337  # of NVIDIA Dynamo's rule, for local hashes and for the chain
cdef Py_ssize_t TOKENS_MAX = limits.REQUEST_TOKENS_MAX
cdef Py_ssize_t BLOCK_TOKENS_MAX = limits.BLOCK_TOKENS_MAX

NAMESPACE_KEY_BYTES = sizeof(uint64_t) * 6


cdef uint64_t local_seed(str lora, str salt):
    """An empty name is the same as none."""
    cdef bytes name
    cdef uint64_t seed = HASH_SEED
    if lora:
        name = lora.encode()
        seed += xxh3_64(PyBytes_AS_STRING(name), len(name), 0)
    if salt:
        name = salt.encode()
        seed += xxh3_64(PyBytes_AS_STRING(name), len(name), 1)
    return seed


cdef void hash_blocks(
    const unsigned char* tokens, Py_ssize_t block_bytes, Py_ssize_t blocks, uint64_t seed, uint64_t* hashes, bint chained
) noexcept nogil:
    """Write the local hash of each block, or its chained ID.

    One loop for both: the CPU hashes the tokens of the next blocks while it waits for this link of the chain.
    """
    cdef Py_ssize_t i
    cdef uint64_t previous, local
    if not chained:
        for i in range(blocks):
            hashes[i] = xxh3_64(tokens + i * block_bytes, <size_t>block_bytes, seed)
        return
    if blocks == 0:
        return
    previous = xxh3_64(tokens, <size_t>block_bytes, seed)
    hashes[0] = previous
    for i in range(1, blocks):
        local = xxh3_64(tokens + i * block_bytes, <size_t>block_bytes, seed)
        previous = xxh3_two_words(previous, local, 16, HASH_SEED)
        hashes[i] = previous


cdef bytes block_hashes(object token_ids, object block_size, str lora, str salt, bint chained):
    if not 1 <= block_size <= BLOCK_TOKENS_MAX:
        raise BadRequestError(
            f"block_size {block_size} is not in 1..{BLOCK_TOKENS_MAX} (BLOCK_TOKENS_MAX)", field="block_size"
        )
    cdef Py_ssize_t block_bytes = <Py_ssize_t>4 * block_size
    cdef uint64_t seed = local_seed(lora, salt)
    cdef Py_ssize_t blocks
    cdef bytes hashes
    cdef uint64_t* to
    cdef Py_buffer view
    PyObject_GetBuffer(token_ids, &view, PyBUF_SIMPLE)
    try:
        if view.len % 4:
            raise BadRequestError(f"token_ids: {view.len} bytes are not a multiple of 4", field="token_ids")
        if view.len // 4 > TOKENS_MAX:
            raise TooLargeError(
                f"token_ids: {view.len // 4} tokens, the limit REQUEST_TOKENS_MAX is {TOKENS_MAX}", field="token_ids"
            )
        blocks = view.len // block_bytes
        hashes = PyBytes_FromStringAndSize(NULL, 8 * blocks)
        to = <uint64_t*>PyBytes_AS_STRING(hashes)
        with nogil:
            hash_blocks(<const unsigned char*>view.buf, block_bytes, blocks, seed, to, chained)
        return hashes
    finally:
        PyBuffer_Release(&view)


def xxh3(data, uint64_t seed=0):
    """The 64-bit XXH3 of `data`."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return xxh3_64(view.buf, <size_t>view.len, seed)
    finally:
        PyBuffer_Release(&view)


def xxh3_of_id(uint64_t block_id):
    """The 64-bit XXH3 of a block ID's 8 bytes, little-endian."""
    cdef unsigned char data[8]
    cdef int i
    for i in range(8):
        data[i] = <unsigned char>(block_id >> (8 * i))
    return xxh3_64(data, 8, 0)


def xxh3_block_ids(token_ids, block_size, str lora not None="", str salt not None=""):
    """Wire IDs of the full blocks of `token_ids` (u32 little-endian): each names all tokens up to its block's end."""
    return block_hashes(token_ids, block_size, lora, salt, True)


def local_block_hashes(token_ids, block_size, str lora not None="", str salt not None=""):
    """Hashes of the full blocks of `token_ids`, each of its own tokens alone: what peers send to be chained."""
    return block_hashes(token_ids, block_size, lora, salt, False)


@cython.final
@cython.auto_pickle(False)
cdef class NamespaceKey:
    """A namespace's keyed permutation of block IDs, made from the 48 bytes of `namespace.derive_namespace_key`."""

    def __cinit__(self, bytes key not None):
        cdef int i, step
        cdef uint64_t multiplier, inverse
        if len(key) != NAMESPACE_KEY_BYTES:
            raise ValueError(f"a namespace key has {NAMESPACE_KEY_BYTES} bytes, not {len(key)}")
        for i in range(3):
            self.key.offsets[i] = xxh3_read64(PyBytes_AS_STRING(key) + 16 * i)
            multiplier = xxh3_read64(PyBytes_AS_STRING(key) + 16 * i + 8) | 1
            # Newton's iteration: an odd number is its own inverse in the lowest 3 bits, each step doubles them to 96.
            inverse = multiplier
            for step in range(5):
                inverse *= 2 - multiplier * inverse
            self.key.multipliers[i] = multiplier
            self.key.inverses[i] = inverse

    def internal_ids(self, wire):
        """The namespace's internal IDs of packed wire IDs."""
        return self._mapped(wire, True)

    def wire_ids(self, internal):
        """The wire IDs of packed internal IDs: the inverse of `internal_ids`."""
        return self._mapped(internal, False)

    def internal_id(self, bytes wire not None, Py_ssize_t position):
        """The internal ID of the block at a position of packed wire IDs."""
        if not 0 <= position < len(wire) // 8:
            raise IndexError(f"position {position} of {len(wire) // 8} blocks")
        return permute(&self.key, xxh3_read64(PyBytes_AS_STRING(wire) + 8 * position))

    cdef bytes _mapped(self, object ids, bint inwards):
        cdef bytes mapped
        cdef uint64_t* to
        cdef Py_buffer view
        PyObject_GetBuffer(ids, &view, PyBUF_SIMPLE)
        try:
            if view.len % 8:
                raise BadRequestError(f"block_ids: {view.len} bytes are not a multiple of 8", field="block_ids")
            mapped = PyBytes_FromStringAndSize(NULL, view.len)
            to = <uint64_t*>PyBytes_AS_STRING(mapped)
            if inwards:
                self.permute_many(<const uint64_t*>view.buf, to, view.len // 8)
            else:
                self.unpermute_many(<const uint64_t*>view.buf, to, view.len // 8)
            return mapped
        finally:
            PyBuffer_Release(&view)

    # `source` may lie at any address (a slice of a message), hence the reads byte by byte that compile to one load.

    cdef void permute_many(self, const uint64_t* source, uint64_t* target, Py_ssize_t count) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(count):
            target[i] = permute(&self.key, xxh3_read64(source + i))

    cdef void unpermute_many(self, const uint64_t* source, uint64_t* target, Py_ssize_t count) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(count):
            target[i] = unpermute(&self.key, xxh3_read64(source + i))
