"""The exact answer: a prefix index without bounds, files or locations, to compare with."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sarp_cluster.replay.request import BLOCK_ID_BYTES

_EMPTY: Final = 0
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: consecutive IDs, as block-hash traces have them, fall far apart."""
_WORD: Final = 2**64 - 1
_SLOTS_MIN: Final = 1_024
_FEW: Final = 24
"""So many IDs are added faster one by one than by NumPy."""


class PrefixOracle:
    """Remembers every sequence it was given and finds the longest prefix of a query among them.

    IDs are chained: an ID names its block and all before it. Since a sequence is inserted from its start, the set of
    IDs inserted is closed under prefixes: if the ID at position i is in it, so are those at all positions before. Along
    a query, membership is therefore true up to the end of the match and false from there on, and bisection finds that
    end exactly with log2(n) probes. `linear=True` looks at one block after the other instead and relies on nothing.
    (Exact up to collisions of the 64-bit IDs themselves, which the index compares as well.)

    Memory: one open-addressing table of 8-byte slots, between 3/8 and 3/4 full: 11 to 21 bytes an ID.
    """

    def __init__(self, *, linear: bool = False) -> None:
        self._linear = linear
        self._count = 0
        self._has_empty = False  # the ID that marks empty slots cannot be stored in one
        self._allocate(_SLOTS_MIN)

    def __len__(self) -> int:
        """Distinct IDs inserted."""
        return self._count + self._has_empty

    def matched_blocks(self, block_ids: bytes) -> int:
        """Blocks of the longest prefix of `block_ids` (u64 little-endian) that was inserted before."""
        ids = memoryview(block_ids).cast("Q")
        if self._linear:
            return next((i for i, block_id in enumerate(ids) if not self._contains(block_id)), len(ids))
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self._contains(ids[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def insert(self, block_ids: bytes) -> int:
        """Remember `block_ids` (u64 little-endian, from position 0) and return how many were new."""
        matched = self.matched_blocks(block_ids)
        return self.add(block_ids[matched * BLOCK_ID_BYTES :])

    def add(self, block_ids: bytes) -> int:
        """Remember IDs, all of whose predecessors are remembered or among them. Returns how many were new."""
        fresh = np.frombuffer(block_ids, "<u8")
        if len(fresh) == 0:
            return 0
        before = len(self)
        while (self._count + len(fresh)) * 4 > len(self._slots) * 3:
            self._grow()
        if len(fresh) <= _FEW:
            for block_id in fresh.tolist():
                self._add(block_id)
        else:
            self._add_many(fresh)
        return len(self) - before

    def _allocate(self, slots: int) -> None:
        self._slots = np.full(slots, _EMPTY, dtype=np.uint64)
        self._view = self._slots.data  # reads one slot several times faster than NumPy does
        self._mask = slots - 1
        self._shift = 65 - slots.bit_length()

    def _grow(self) -> None:
        kept = self._slots[self._slots != _EMPTY]
        self._view.release()
        self._allocate(2 * len(self._slots))
        self._count = 0
        if len(kept):
            self._add_many(kept)

    def _contains(self, block_id: int) -> bool:
        if block_id == _EMPTY:
            return self._has_empty
        slot = (block_id * _SPREAD & _WORD) >> self._shift
        while (found := self._view[slot]) != _EMPTY:
            if found == block_id:
                return True
            slot = (slot + 1) & self._mask
        return False

    def _add(self, block_id: int) -> None:
        if block_id == _EMPTY:
            self._has_empty = True
            return
        slot = (block_id * _SPREAD & _WORD) >> self._shift
        while (found := self._view[slot]) != _EMPTY:
            if found == block_id:
                return
            slot = (slot + 1) & self._mask
        self._view[slot] = block_id
        self._count += 1

    def _add_many(self, fresh: NDArray[np.uint64]) -> None:
        if (fresh == _EMPTY).any():
            self._has_empty = True
        ids = np.unique(fresh[fresh != _EMPTY])
        slots = ((ids * np.uint64(_SPREAD)) >> np.uint64(self._shift)).astype(np.intp)
        while len(ids):
            found = self._slots[slots]
            free = found == _EMPTY
            # Several IDs may want one free slot: the last one written has it, which the second look tells.
            self._slots[slots[free]] = ids[free]
            placed = self._slots[slots] == ids
            self._count += int(np.count_nonzero(placed & free))
            ids, slots = ids[~placed], (slots[~placed] + 1) & self._mask
