"""All that an index holds, in an order in which it can be told again: parents before children, origins before copies.

Segments hang together as a forest. It is walked as *chains*: a segment, the first of its children, the first of that
one's, and so on; the other children begin chains of their own. Chains come by the window and the fork of their first
segment, so a chain's ancestors and origins are all in chains before it. A chain is read in pieces of at most
PIECE_SEGMENTS.

Memory: some 40 bytes a segment for the order, and one piece. The index must not change meanwhile (`stop_background`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import ConflictError, CorruptRecordError, invariant
from shard.state import IndexState

PIECE_SEGMENTS: Final = 32
SEGMENTS_A_READ: Final = 256
ROWS_A_STEP: Final = 4_096
READ: Final = 1

Segment = dict[str, Any]
"""A segment as `SegmentBatch.describe` gives it."""


class Piece(NamedTuple):
    """Up to PIECE_SEGMENTS segments, each the parent of the next."""

    before: Segment | None
    """The parent of the first one, which an earlier piece has told; None at the start of a sequence."""
    segments: list[Segment]


async def pieces(state: IndexState) -> AsyncIterator[Piece]:
    """Every segment once. Raises CorruptRecordError for a segment that cannot be read, ConflictError after a change."""
    version, told = state.table.version, 0
    chains = _chains(state.table)
    waiting: list[list[int]] = []
    more = True
    while more:
        chain = next(chains, None)
        more = chain is not None
        if chain is not None:
            waiting.append(chain)
        if waiting and (not more or sum(map(len, waiting)) >= SEGMENTS_A_READ):
            for piece in await _read(state, waiting):
                told += len(piece.segments)
                yield piece
            waiting = []
        if state.table.version != version:
            raise ConflictError("the index changed while its contents were read; try again when nothing changes it")
    invariant(
        told == state.table.segments, "segments that hang together in a circle", told=told, there=state.table.segments
    )


def _chains(table: SegmentTable) -> Iterator[list[int]]:
    """Slots of the segments of each piece; the first is that of the parent before the piece, or 0."""
    slots, parents, order_by = _rows(table)
    if not len(slots):
        return
    end = int(slots[-1]) + 1
    order = np.lexsort((slots, order_by)).astype(np.uint32)
    ordered = slots[order]
    # The first child of each parent goes on with its parent's chain: in reverse order, the last one written.
    following = np.zeros(end, dtype=np.uint32)
    following[parents[order[::-1]]] = ordered[::-1]
    following[0] = 0
    parent_of = np.zeros(end, dtype=np.uint32)
    parent_of[slots] = parents
    begins = (parents[order] == 0) | (following[parents[order]] != ordered)
    starts = ordered[begins]
    del order, ordered, begins, slots, parents, order_by
    for at in range(0, len(starts), ROWS_A_STEP):
        for start in starts[at : at + ROWS_A_STEP].tolist():
            piece, slot = [int(parent_of[start])], start
            while slot:
                if len(piece) > PIECE_SEGMENTS:
                    yield piece
                    piece = [piece[-1]]
                piece.append(slot)
                slot = int(following[slot])
            yield piece


def _rows(table: SegmentTable) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64]]:
    """(slots, parents, namespace | window | fork as one number) of all segments, by slot."""
    slots: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)]
    parents: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)]
    order_by: list[NDArray[np.uint64]] = [np.zeros(0, dtype=np.uint64)]
    for some in table.slots_in_use(ROWS_A_STEP):
        rows = [row for slot in some if (row := table.describe(slot)) is not None]
        slots.append(np.array(some, dtype=np.uint32))
        parents.append(np.array([row["parent"] for row in rows], dtype=np.uint32))
        order = [row["namespace"] << 24 | row["window"] << 8 | row["fork"] for row in rows]
        order_by.append(np.array(order, dtype=np.uint64))
    return np.concatenate(slots), np.concatenate(parents), np.concatenate(order_by)


async def _read(state: IndexState, chains: list[list[int]]) -> list[Piece]:
    """Read the segments of some pieces together."""
    search = state.search()
    search.load_segments(list(dict.fromkeys(slot for chain in chains for slot in chain if slot)))
    if state.store.read_cached(search.batch):
        await state.wait_for(search.batch)
    read = {segment["slot"]: segment for segment in search.batch.describe()}
    state.idle_searches.append(search)
    for segment in read.values():
        if segment["state"] != READ:
            raise CorruptRecordError(
                f"segment {segment['slot']} (window {segment['window']}) is damaged: `sarp verify` names the place"
            )
    return [Piece(read.get(chain[0]), [read[slot] for slot in chain[1:]]) for chain in chains]


def mask_ranges(mask: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of ones."""
    while mask:
        first = (mask & -mask).bit_length() - 1
        shifted = mask >> first
        count = (~shifted & (shifted + 1)).bit_length() - 1
        yield first, count
        mask &= ~(((1 << count) - 1) << first)
