"""Indexes to compare with. All live in memory only: nothing of them is left after a crash."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Match(NamedTuple):
    """The longest prefix that somebody holds, and who holds how much of it: our index's answer at one tier."""

    matched: int
    """Blocks of the longest prefix of which each block has a holder."""
    workers: list[tuple[int, int]]
    """(worker, blocks of its longest prefix), the longest first, then by worker; none without block 0."""


class Contestant(Protocol):
    """What a benchmark drives. IDs are u64 little-endian, packed; workers are small integers."""

    @property
    def name(self) -> str: ...

    def match(self, ids: bytes) -> Match: ...

    def insert(self, ids: bytes, worker: int, first: int) -> None:
        """`worker` newly holds the blocks from position `first` on."""
