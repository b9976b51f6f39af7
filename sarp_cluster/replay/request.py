"""What a trace is: requests in replay order, each a context to match and a sequence to insert after it.

Block IDs are wire IDs, u64 little-endian, packed into one `bytes`: n blocks are 8 n bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError

BLOCK_ID_BYTES: Final = 8
"""Bytes of a wire ID."""

TraceKind = Literal["tokens", "blocks"]
"""What a trace file holds: token IDs, which a namespace hashes, or block IDs that somebody hashed already."""

BlockIds = Callable[[bytes], bytes]
"""Hashes tokens (u32 little-endian) to the chained IDs of their full blocks, as `Namespace.block_ids` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn: match `context`, then the worker holds `sequence` from block `first` on."""

    session: int
    """Whose turn it is. A session stays with one worker."""
    thread: int = 0
    """A line of requests inside the session: the next one starts when the one before has been answered."""
    context: bytes
    """IDs of the context's full blocks. Empty when the context is shorter than a block."""
    sequence: bytes
    """IDs to insert after the match, from position 0: the context and, in token traces, the answer."""
    first: int
    """Position, in blocks, from which the worker newly holds blocks: those before are of this thread's last insert."""
    context_tokens: int
    """Tokens of the context, the last partial block included."""

    @property
    def context_blocks(self) -> int:
        """Blocks to match."""
        return len(self.context) // BLOCK_ID_BYTES

    @property
    def sequence_blocks(self) -> int:
        """Blocks of the sequence to insert."""
        return len(self.sequence) // BLOCK_ID_BYTES


class Trace(ABC):
    """A trace file, read and checked. Requests are built as they are asked for, so a long trace stays small."""

    kind: TraceKind

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        """The file's name without its endings."""
        self.block_tokens = block_tokens
        """Tokens a block: the namespace that replays the trace must have the same block size."""

    @property
    @abstractmethod
    def request_count(self) -> int:
        """Requests in the whole trace."""

    @property
    @abstractmethod
    def session_count(self) -> int:
        """Sessions in the whole trace."""

    @abstractmethod
    def requests(self, block_ids: BlockIds, *, limit: int | None = None) -> Iterator[Request]:
        """The first `limit` requests (None: all) in replay order; may be called again for another pass.

        `block_ids` hashes tokens for token traces; traces of block IDs never call it.
        """


def checked_block_tokens(block_tokens: int) -> int:
    """`block_tokens` if it is a possible block size. Raises BadRequestError if not."""
    if not 1 <= block_tokens <= limits.BLOCK_TOKENS_MAX:
        raise BadRequestError(
            f"block_tokens: {block_tokens} is not 1 to {limits.BLOCK_TOKENS_MAX}", field="block_tokens"
        )
    return block_tokens
