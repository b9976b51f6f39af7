"""Traces of block IDs that somebody hashed already: coding-assistant sessions and Mooncake's chat service.

In both an ID names its block and all before it, so it serves as wire ID as it is (hash profile `opaque`). A block size
smaller than the native one cuts each block into f = native / wanted pieces: ID b becomes b f, b f + 1, …, b f + f - 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarp_cluster.errors import BadRequestError, TraceError
from sarp_cluster.replay.request import BLOCK_ID_BYTES, BlockIds, Request, Trace, checked_block_tokens

CODING_AGENT_BLOCK_TOKENS: Final = 64
MOONCAKE_BLOCK_TOKENS: Final = 512

BLOCK_ID_MAX: Final = 2**53
"""Highest ID a file may name: cut into single tokens (512 = 2^9 pieces) it still fits into 64 bits."""

Row = dict[str, Any]


def _pieces(native: int, block_tokens: int | None) -> int:
    """Blocks of the wanted size in a native one. Raises BadRequestError if it is not a whole number."""
    wanted = native if block_tokens is None else checked_block_tokens(block_tokens)
    if native % wanted:
        raise BadRequestError(
            f"block_tokens: {wanted} does not divide this trace's blocks of {native} tokens", field="block_tokens"
        )
    return native // wanted


def _rows(raw: bytes, path: Path) -> Iterator[tuple[int, Row]]:
    """Line numbers, from 1, and JSON objects."""
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}: line {number} is not a JSON object")
        yield number, row


def _natural(row: Row, key: str, where: str, *, at_most: int = BLOCK_ID_MAX) -> int:
    value = row.get(key)
    if type(value) is not int or not 0 <= value <= at_most:
        raise TraceError(f"{where}: `{key}` is not a whole number from 0 to {at_most}")
    return value


class CodingAgentRow(NamedTuple):
    """One line of a coding-agent trace."""

    session: int
    thread: int
    tokens: int
    reused: int
    """Leading IDs that are those of the request before in the same session and thread."""
    runs: tuple[tuple[int, int], ...]
    """The IDs after those, as (first, count) of consecutive IDs."""


def parse_coding_agent(raw: bytes, path: Path) -> list[CodingAgentRow]:
    """Read and check the lines. Raises TraceError, naming `path`, the line and what is wrong."""
    rows: list[CodingAgentRow] = []
    lengths: dict[int, int] = {}
    session, ended = -1, set[int]()
    for number, row in _rows(raw, path):
        where = f"{path}: line {number}"
        runs = _runs(row, where)
        parsed = CodingAgentRow(
            _natural(row, "s", where), _natural(row, "a", where), _natural(row, "in", where),
            _natural(row, "k", where), runs,
        )  # fmt: skip
        if parsed.session != session:
            ended.add(session)
            if parsed.session in ended:
                raise TraceError(f"{where}: session {parsed.session} comes back after another one")
            session = parsed.session
            lengths.clear()
        held = lengths.get(parsed.thread, 0)
        if parsed.reused > held:
            raise TraceError(
                f"{where}: `k` is {parsed.reused}, but the request before in this thread had {held} blocks"
            )
        blocks = parsed.reused + sum(count for _, count in runs)
        if blocks != parsed.tokens // CODING_AGENT_BLOCK_TOKENS:
            raise TraceError(f"{where}: {blocks} blocks are not the full blocks of {parsed.tokens} tokens")
        lengths[parsed.thread] = blocks
        rows.append(parsed)
    if not rows:
        raise TraceError(f"{path}: no requests")
    return rows


def _runs(row: Row, where: str) -> tuple[tuple[int, int], ...]:
    runs = row.get("b")
    if not isinstance(runs, list):
        raise TraceError(f"{where}: `b` is not a list of runs")
    checked: list[tuple[int, int]] = []
    for run in runs:
        match run:
            case [int(first), int(count)] if first >= 0 and count >= 1 and first + count <= BLOCK_ID_MAX:
                checked.append((first, count))
            case _:
                raise TraceError(f"{where}: run {run!r} in `b` is not [first, count] below {BLOCK_ID_MAX}")
    return tuple(checked)


class CodingAgentTrace(Trace):
    """Coding-assistant sessions, one after the other, in file order. Sub-tasks are threads of their session."""

    kind = "blocks"

    def __init__(self, name: str, rows: list[CodingAgentRow], *, block_tokens: int | None = None) -> None:
        self._pieces = _pieces(CODING_AGENT_BLOCK_TOKENS, block_tokens)
        super().__init__(name, CODING_AGENT_BLOCK_TOKENS // self._pieces)
        self._rows = rows

    @property
    def request_count(self) -> int:
        """Lines of the file."""
        return len(self._rows)

    @property
    def session_count(self) -> int:
        """Sessions of the file."""
        return len({row.session for row in self._rows})

    def requests(self, block_ids: BlockIds, *, limit: int | None = None) -> Iterator[Request]:
        """The first `limit` requests; the context is inserted after its match.

        Holds the last context of each thread of the session it is in.
        """
        return islice(self._all_requests(), limit)

    def _all_requests(self) -> Iterator[Request]:
        contexts: dict[int, bytes] = {}
        session = -1
        for row in self._rows:
            if row.session != session:
                contexts.clear()
                session = row.session
            first = row.reused * self._pieces
            context = b"".join(
                [contexts.get(row.thread, b"")[: first * BLOCK_ID_BYTES], *(self._expand(*run) for run in row.runs)]
            )
            contexts[row.thread] = context
            yield Request(
                session=row.session,
                thread=row.thread,
                context=context,
                sequence=context,
                first=first,
                context_tokens=row.tokens,
            )

    def _expand(self, first: int, count: int) -> bytes:
        # The pieces of consecutive IDs are consecutive.
        return np.arange(first * self._pieces, (first + count) * self._pieces, dtype="<u8").tobytes()


class MooncakeRows(NamedTuple):
    """The lines of a Mooncake trace, as columns."""

    tokens: NDArray[np.int64]
    """Shape (requests,): `input_length`."""
    starts: NDArray[np.int64]
    """Shape (requests + 1,): where each request's IDs begin in `ids`."""
    ids: NDArray[np.uint64]
    """Shape (blocks,): `hash_ids` of all requests, one after the other."""


def parse_mooncake(raw: bytes, path: Path) -> MooncakeRows:
    """Read and check the lines. Raises TraceError, naming `path`, the line and what is wrong."""
    tokens: list[int] = []
    starts, parts = [0], list[NDArray[np.uint64]]()
    for number, row in _rows(raw, path):
        where = f"{path}: line {number}"
        length = _natural(row, "input_length", where)
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < BLOCK_ID_MAX for i in ids):
            raise TraceError(f"{where}: `hash_ids` is not a list of whole numbers below {BLOCK_ID_MAX}")
        if len(ids) != -(-length // MOONCAKE_BLOCK_TOKENS):
            raise TraceError(f"{where}: {len(ids)} `hash_ids` are not the blocks of {length} tokens")
        tokens.append(length)
        parts.append(np.array(ids, dtype="<u8"))
        starts.append(starts[-1] + len(ids))
    if not tokens:
        raise TraceError(f"{path}: no requests")
    return MooncakeRows(np.array(tokens, np.int64), np.array(starts, np.int64), np.concatenate(parts))


class MooncakeTrace(Trace):
    """A chat service's requests in order of arrival. Sessions are not named, so each request is its own.

    At the native block size a partial last block counts, as the published ID names it; at a smaller one only the full
    blocks of the input do.
    """

    kind = "blocks"

    def __init__(self, name: str, rows: MooncakeRows, *, block_tokens: int | None = None) -> None:
        self._pieces = _pieces(MOONCAKE_BLOCK_TOKENS, block_tokens)
        super().__init__(name, MOONCAKE_BLOCK_TOKENS // self._pieces)
        self._rows = rows

    @property
    def request_count(self) -> int:
        """Lines of the file."""
        return len(self._rows.tokens)

    @property
    def session_count(self) -> int:
        """As many as requests."""
        return self.request_count

    def requests(self, block_ids: BlockIds, *, limit: int | None = None) -> Iterator[Request]:
        """The first `limit` requests; the context is inserted after its match."""
        return islice(self._all_requests(), limit)

    def _all_requests(self) -> Iterator[Request]:
        offsets = np.arange(self._pieces, dtype="<u8")
        starts = self._rows.starts.tolist()
        for session, tokens in enumerate(self._rows.tokens.tolist()):
            ids = self._rows.ids[starts[session] : starts[session + 1]]
            if self._pieces > 1:
                ids = (ids[:, np.newaxis] * np.uint64(self._pieces) + offsets).ravel()[: tokens // self.block_tokens]
            context = ids.astype("<u8", copy=False).tobytes()
            yield Request(session=session, context=context, sequence=context, first=0, context_tokens=tokens)
