"""What a match may answer, by a ledger: at least what surely was there the whole time, at most what may have been.

A block is *surely* held by a worker from the answer of an insert to the beginning of what undoes it, and *possibly*
from the beginning of the insert to the answer of what undoes it; never, if the insert was refused as not applied.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.chaos.ledger import Begun, Ended, Line
from tests.chaos.workload import Session


class Held(NamedTuple):
    """A change as a block sees it."""

    began: float
    ended: float
    """Infinite: it is not known what became of it."""
    inserted: bool
    """Else removed."""
    generation: int


class Clear(NamedTuple):
    """All that a worker held before a generation is gone."""

    began: float
    ended: float
    generation: int


class Bounds(NamedTuple):
    """Of a match's answer."""

    low: int
    high: int
    workers_low: dict[str, int]
    """Blocks each surely holds, from the first; none of 0."""


class Oracle:
    """Knows a whole history and answers about any moment of it."""

    def __init__(self, every: Sequence[Session], lines: Iterable[Line]) -> None:
        self._ids = {number: one.block_ids() for number, one in enumerate(every)}
        self._held: dict[int, dict[str, list[Held]]] = {}
        self._clears: dict[str, list[Clear]] = {}
        begun: dict[int, Begun] = {}
        ended: dict[int, Ended] = {}
        for line in lines:
            if isinstance(line, Begun):
                begun[line.number] = line
            elif isinstance(line, Ended):
                ended[line.number] = line
        for number, change in begun.items():
            end = ended.get(number)
            if end is None or end.how != "refused":
                self._enter(change, end)
        self.changes = len(begun)

    def _enter(self, change: Begun, end: Ended | None) -> None:
        at = math.inf if end is None else end.at
        if change.kind == "clear":
            generation = change.generation + 1 if end is None else end.generation
            self._clears.setdefault(change.worker, []).append(Clear(change.at, at, generation))
            return
        held = Held(change.at, at, change.kind == "insert", change.generation)
        for block_id in self._ids[change.session][change.first : change.last]:
            self._held.setdefault(block_id, {}).setdefault(change.worker, []).append(held)

    def _clear_of(self, worker: str, generation: int) -> Clear | None:
        """What ended a generation."""
        return next((one for one in self._clears.get(worker, ()) if one.generation > generation), None)

    def possibly(self, block_id: int, worker: str, began: float, ended: float) -> bool:
        """Can the worker have held the block at some moment between the two?"""
        changes = self._held.get(block_id, {}).get(worker, [])
        for index in range(bisect_left(changes, (ended,)) - 1, -1, -1):
            change = changes[index]
            if change.inserted:
                clear = self._clear_of(worker, change.generation)
                return clear is None or clear.ended >= began
            if change.ended < began:
                return False
        return False

    def surely(self, block_id: int, worker: str, began: float, ended: float) -> bool:
        """Did the worker hold the block at every moment between the two?"""
        changes = self._held.get(block_id, {}).get(worker, [])
        for index in range(bisect_left(changes, (ended,)) - 1, -1, -1):
            change = changes[index]
            if not change.inserted:
                return False
            if change.ended < began:
                clear = self._clear_of(worker, change.generation)
                return clear is None or clear.began >= ended
        return False

    def possible_prefix(self, session: int, blocks: int, worker: str, began: float, ended: float) -> int:
        """How many of a session's first blocks can a worker have held?"""
        for index, block_id in enumerate(self._ids[session][:blocks]):
            if not self.possibly(block_id, worker, began, ended):
                return index
        return blocks

    def bounds(self, session: int, blocks: int, began: float, ended: float) -> Bounds:
        """What a match of a session's first blocks may answer that was asked and answered at these times."""
        ids = self._ids[session][:blocks]
        low = high = 0
        workers: dict[str, int] = {}
        while low < len(ids):
            surely = {
                worker
                for worker in self._held.get(ids[low], {})
                if (low == 0 or workers.get(worker) == low) and self.surely(ids[low], worker, began, ended)
            }
            workers |= dict.fromkeys(surely, low + 1)
            if not surely and not any(
                self.surely(ids[low], worker, began, ended) for worker in self._held.get(ids[low], {})
            ):
                break
            low += 1
        high = low
        while high < len(ids) and any(
            self.possibly(ids[high], worker, began, ended) for worker in self._held.get(ids[high], {})
        ):
            high += 1
        return Bounds(low, high, workers)
