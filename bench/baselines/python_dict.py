"""DRAM-BlockHash in plain Python: one dict from block ID to its holders, as vLLM's block pool and many routers have it.

No strawman: holders are one integer with a bit for each worker, and the loops over blocks run inside the interpreter's
C code (`map`, `groupby`, `list.index`), which is about twice as fast as the same in a `for` loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, repeat
from operator import or_

from bench.baselines import Match

_LOOKUP_BLOCKS = 256
"""Blocks looked up before asking whether the prefix ended: a long query that nobody holds stops early."""


def _block_ids(ids: bytes) -> list[int]:
    return memoryview(ids).cast("Q").tolist()


def _workers_of(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class DictIndex:
    """Block ID -> bit mask of the workers that hold it."""

    name = "Python dict"

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, ids: bytes) -> Match:
        block_ids = _block_ids(ids)
        get = self._holders.get
        masks: list[int | None] = []
        for at in range(0, len(block_ids), _LOOKUP_BLOCKS):
            masks += map(get, block_ids[at : at + _LOOKUP_BLOCKS])
            if masks[-1] is None:
                break
        masks.append(None)
        matched = masks.index(None)

        alive = masks[0] or 0
        start = 0
        ends: list[tuple[int, int]] = []  # (blocks, workers whose prefix ends there)
        for mask, _ in groupby(masks):  # runs of blocks with the same holders: few
            start = masks.index(mask, start)
            if gone := alive & ~(mask or 0):
                ends.append((start, gone))
                alive ^= gone
            if not alive:
                break
        return Match(matched, [(worker, end) for end, gone in reversed(ends) for worker in _workers_of(gone)])

    def insert(self, ids: bytes, worker: int, first: int) -> None:
        block_ids = _block_ids(ids)[first:]
        bit = 1 << worker
        holders = self._holders
        if holders.keys().isdisjoint(block_ids):
            holders.update(dict.fromkeys(block_ids, bit))
        else:
            holders.update(zip(block_ids, map(or_, map(holders.get, block_ids, repeat(0)), repeat(bit)), strict=False))
