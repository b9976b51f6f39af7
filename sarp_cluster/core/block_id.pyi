"""Block IDs: from tokens to wire IDs, from wire IDs to the internal IDs of a namespace."""

from typing import Final, final

from typing_extensions import Buffer

NAMESPACE_KEY_BYTES: Final = 48

def xxh3(data: Buffer, seed: int = 0) -> int:
    """The 64-bit XXH3 of `data`."""

def xxh3_of_id(block_id: int) -> int:
    """The 64-bit XXH3 of a block ID's 8 bytes, little-endian."""

def xxh3_block_ids(token_ids: Buffer, block_size: int, lora: str = "", salt: str = "") -> bytes:
    """Wire IDs of the full blocks of `token_ids` (u32 little-endian): each names all tokens up to its block's end."""

def local_block_hashes(token_ids: Buffer, block_size: int, lora: str = "", salt: str = "") -> bytes:
    """Hashes of the full blocks of `token_ids`, each of its own tokens alone: what peers send to be chained."""

@final
class NamespaceKey:
    """A namespace's keyed permutation of block IDs, made from the 48 bytes of `namespace.derive_namespace_key`."""

    def __init__(self, key: bytes) -> None: ...
    def internal_ids(self, wire: Buffer) -> bytes:
        """The namespace's internal IDs of packed wire IDs."""

    def internal_id(self, wire: bytes, position: int) -> int:
        """The internal ID of the block at a position of packed wire IDs."""

    def wire_ids(self, internal: Buffer) -> bytes:
        """The wire IDs of packed internal IDs: the inverse of `internal_ids`."""
