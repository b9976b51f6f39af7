"""KTRC: traces of token IDs, whole sessions of turns (layout in examples/sample/README.md).

Unpacked, integers little-endian, nothing padded: magic `KTRC0001`, vocabulary size u32, sessions S u32, turns T u64,
tokens N u64, then u32 arrays turns[S], tokens[S], context end[T], output end[T], and token IDs u16[N]. Ends are
offsets into the session's own tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sarp_cluster.errors import TraceError, invariant
from sarp_cluster.replay.request import BLOCK_ID_BYTES, BlockIds, Request, Trace, checked_block_tokens

MAGIC: Final = b"KTRC0001"
HEADER: Final = struct.Struct("<8sIIQQ")
BLOCK_TOKENS_DEFAULT: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSessions:
    """The contents of one KTRC file."""

    vocabulary: int
    """Token IDs are below it."""
    turns: NDArray[np.uint32]
    """Shape (S,): turns of each session, at least one."""
    lengths: NDArray[np.uint32]
    """Shape (S,): tokens of each session."""
    context_ends: NDArray[np.uint32]
    """Shape (T,): where each turn's context ends, in tokens of its session."""
    output_ends: NDArray[np.uint32]
    """Shape (T,): where each turn's answer ends."""
    tokens: NDArray[np.uint16]
    """Shape (N,): the sessions' token IDs, one session after the other."""


def parse_ktrc(raw: bytes, path: Path) -> TokenSessions:
    """Read and check an unpacked KTRC file. Raises TraceError, naming `path` and what is wrong."""
    if len(raw) < HEADER.size:
        raise TraceError(f"{path}: {len(raw)} bytes are too few for a KTRC header of {HEADER.size}")
    magic, vocabulary, session_count, turn_count, token_count = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise TraceError(f"{path}: the magic is {magic!r}, not {MAGIC!r}")
    promised = HEADER.size + 8 * session_count + 8 * turn_count + 2 * token_count
    if len(raw) != promised:
        raise TraceError(
            f"{path}: {len(raw)} bytes, but {session_count} sessions, {turn_count} turns and {token_count} tokens "
            f"take {promised}"
        )
    at = HEADER.size
    columns: list[NDArray[np.uint32]] = []
    for count in (session_count, session_count, turn_count, turn_count):
        columns.append(np.frombuffer(raw, "<u4", count, at))
        at += 4 * count
    sessions = TokenSessions(
        vocabulary=vocabulary,
        turns=columns[0],
        lengths=columns[1],
        context_ends=columns[2],
        output_ends=columns[3],
        tokens=np.frombuffer(raw, "<u2", token_count, at),
    )
    _check(sessions, path)
    return sessions


def _check(sessions: TokenSessions, path: Path) -> None:
    turns = sessions.turns.astype(np.int64)
    lengths = sessions.lengths.astype(np.int64)
    turn_count, token_count = len(sessions.context_ends), len(sessions.tokens)
    if int(turns.sum()) != turn_count:
        raise TraceError(f"{path}: the sessions have {int(turns.sum())} turns, the header says {turn_count}")
    if int(lengths.sum()) != token_count:
        raise TraceError(f"{path}: the sessions have {int(lengths.sum())} tokens, the header says {token_count}")
    if not len(turns):
        raise TraceError(f"{path}: no sessions")
    if not turns.all():
        raise TraceError(f"{path}: session {int(np.argmin(turns))} has no turns")
    # Context and output ends in turn must grow from above 0 within a session: every step is positive, where the step
    # into a session's first context end starts from 0.
    ends = np.stack([sessions.context_ends, sessions.output_ends], axis=1).astype(np.int64).ravel()
    steps = np.diff(ends, prepend=0)
    last_turns = np.cumsum(turns) - 1
    first_ends = 2 * (last_turns - turns + 1)
    steps[first_ends] = ends[first_ends]
    wrong = np.flatnonzero(steps <= 0)
    if len(wrong):
        turn = int(wrong[0]) // 2
        session = int(np.searchsorted(last_turns, turn))
        raise TraceError(
            f"{path}: session {session}: the ends of turn {turn - int(first_ends[session]) // 2} do not grow"
        )
    short = np.flatnonzero(sessions.output_ends[last_turns] != lengths)
    if len(short):
        session = int(short[0])
        raise TraceError(
            f"{path}: session {session} has {int(lengths[session])} tokens, its last turn ends at "
            f"{int(sessions.output_ends[last_turns[session]])}"
        )
    if int(sessions.tokens.max()) >= sessions.vocabulary:
        raise TraceError(
            f"{path}: token ID {int(sessions.tokens.max())} is not below the vocabulary size {sessions.vocabulary}"
        )


class TokenTrace(Trace):
    """A KTRC trace in the paper's order: for turn 0, 1, 2, …, every session that has that turn, in file order."""

    kind = "tokens"

    def __init__(self, name: str, sessions: TokenSessions, *, block_tokens: int = BLOCK_TOKENS_DEFAULT) -> None:
        super().__init__(name, checked_block_tokens(block_tokens))
        self.sessions = sessions

    @property
    def request_count(self) -> int:
        """Turns of all sessions."""
        return len(self.sessions.context_ends)

    @property
    def session_count(self) -> int:
        """Sessions of the file."""
        return len(self.sessions.turns)

    def requests(self, block_ids: BlockIds, *, limit: int | None = None) -> Iterator[Request]:
        """The first `limit` requests. Each session's tokens are hashed once, at its first turn, and cut per turn.

        The hashes are kept until the session's last turn: 8 bytes for each block of the trace at most.
        """
        return islice(self._all_requests(block_ids), limit)

    def _all_requests(self, block_ids: BlockIds) -> Iterator[Request]:
        turns = self.sessions.turns.tolist()
        token_starts = [0, *np.cumsum(self.sessions.lengths, dtype=np.int64).tolist()]
        turn_starts = [0, *np.cumsum(self.sessions.turns, dtype=np.int64).tolist()]
        contexts, outputs = self.sessions.context_ends.tolist(), self.sessions.output_ends.tolist()
        hashed: dict[int, bytes] = {}
        live = list(range(len(turns)))
        turn = 0
        while live:
            for session in live:
                if turn == 0:
                    tokens = self.sessions.tokens[token_starts[session] : token_starts[session + 1]]
                    hashed[session] = self._hash(tokens, block_ids)
                at = turn_starts[session] + turn
                ids = hashed[session]
                yield Request(
                    session=session,
                    context=ids[: contexts[at] // self.block_tokens * BLOCK_ID_BYTES],
                    sequence=ids[: outputs[at] // self.block_tokens * BLOCK_ID_BYTES],
                    first=outputs[at - 1] // self.block_tokens if turn else 0,
                    context_tokens=contexts[at],
                )
                if turn + 1 == turns[session]:
                    del hashed[session]
            turn += 1
            live = [session for session in live if turns[session] > turn]

    def _hash(self, tokens: NDArray[np.uint16], block_ids: BlockIds) -> bytes:
        ids = block_ids(tokens.astype("<u4").tobytes())
        full_blocks = len(tokens) // self.block_tokens
        invariant(
            len(ids) == full_blocks * BLOCK_ID_BYTES,
            "block_ids must give one ID for each full block",
            tokens=len(tokens),
            block_tokens=self.block_tokens,
            id_bytes=len(ids),
        )
        return ids
