"""What a driver did to a store, in a file outside of it, so that a crash can be held against it.

One line each, on the disk before the driver goes on: `pending N OPERATION` before an operation, then `acked N` when it
was answered as durable, `relaxed N` when it was answered without that promise, `refused N` when it failed: it may have
happened or not. A worker is used by one task of one driver, so that its operations have an order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from sarp_cluster.config import IndexConfig
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker

SECRET: Final = bytes(range(32))
SPEC: Final = NamespaceSpec(model="crash", hash_profile=HashProfile.OPAQUE)
CONFIG: Final = IndexConfig(
    segment_blocks=4,
    base_points=2,
    refinement_threshold=4,
    pruning_threshold=2,
    retrieval_max=None,
    snapshot_log_bytes=4_096,
    delta_segments_max=8,
    log_file_bytes=4_096,
)
"""Small, so that a second meets file changes, refinement, folding and merging; no cap, so that answers are exact."""


class Operation(NamedTuple):
    """One change. `kind`: insert, remove or clear."""

    kind: str
    worker: str
    generation: int
    tokens: tuple[int, ...] = ()
    tier: int | None = 0
    first: int = 0
    last: int | None = None
    handle: int | None = None
    durable: bool = True

    @property
    def holder(self) -> Worker:
        """The worker."""
        return Worker(self.worker)

    @property
    def block_ids(self) -> bytes:
        """Wire IDs of the tokens' blocks."""
        return chained_block_ids(self.tokens)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the method of an index, but for `durable`."""
        if self.kind == "clear":
            return {"generation": self.generation}
        tier = None if self.tier is None else Tier(self.tier)
        arguments = {"worker": self.holder, "generation": self.generation, "tier": tier, "first": self.first}
        return arguments | ({"last": self.last} if self.kind == "remove" else {"handle": self.handle})


class Notes(Protocol):
    """A ledger, as a driver uses it."""

    next: int
    """Number of the next operation."""

    def pending(self, operation: Operation) -> int:
        """Note what is about to be done. Returns its number."""

    def answered(self, number: int, how: str) -> None:
        """Note the answer: acked, relaxed or refused."""


class Ledger:
    """Appends to a ledger. Each line is durable when its method returns."""

    def __init__(self, path: Path) -> None:
        self.next = 1 + max((entry.number for entry in read_ledger(path)), default=0)
        # O_DSYNC, not fsync: tests that make the Nth fsync fail count those of the store.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)

    def pending(self, operation: Operation) -> int:
        """Note what is about to be done. Returns its number."""
        number = self.next
        self.next += 1
        self._write(f"pending {number} {json.dumps(operation)}\n")
        return number

    def answered(self, number: int, how: str) -> None:
        """Note the answer: acked, relaxed or refused."""
        self._write(f"{how} {number}\n")

    def _write(self, line: str) -> None:
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Entry(NamedTuple):
    """An operation and what became of it: pending, acked, relaxed or refused."""

    number: int
    operation: Operation
    outcome: str


class TimedLedger:
    """A ledger in memory that knows when each line was written, by a clock of the caller's.

    So one run can be held against a crash at any of its moments.
    """

    def __init__(self, clock: Callable[[], int], before: Iterable[Entry] = ()) -> None:
        self.clock = clock
        self._before = list(before)
        self.next = 1 + max((entry.number for entry in self._before), default=0)
        self._operations: dict[int, Operation] = {}
        self._lines: list[tuple[int, int, str]] = []

    def pending(self, operation: Operation) -> int:
        """Note what is about to be done. Returns its number."""
        number = self.next
        self.next += 1
        self._operations[number] = operation
        self._lines.append((self.clock(), number, "pending"))
        return number

    def answered(self, number: int, how: str) -> None:
        """Note the answer: acked, relaxed or refused."""
        self._lines.append((self.clock(), number, how))

    def settle(self, how: str) -> None:
        """Note what became of all that was answered without the promise: acked, or refused: lost or not."""
        for entry in self.at(self.clock()):
            if entry.outcome == "relaxed" and entry.number in self._operations:
                self.answered(entry.number, how)

    def at(self, moment: int) -> list[Entry]:
        """The entries as a crash at a moment leaves them: what the clock says then was written before."""
        entries = {entry.number: entry for entry in self._before}
        for when, number, word in self._lines:
            if when > moment:
                break
            if word == "pending":
                entries[number] = Entry(number, self._operations[number], word)
            else:
                entries[number] = entries[number]._replace(outcome=word)
        return list(entries.values())


def read_ledger(path: Path) -> list[Entry]:
    """The entries in order; none if there is no ledger. A line that a kill cut off was not promised."""
    entries: dict[int, Entry] = {}
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            word, number, *rest = line.split(maxsplit=2)
            if word == "pending":
                values = json.loads(rest[0])
                operation = Operation(*values)._replace(tokens=tuple(values[Operation._fields.index("tokens")]))
                entries[int(number)] = Entry(int(number), operation, word)
            else:
                entries[int(number)] = entries[int(number)]._replace(outcome=word)
    return list(entries.values())


def acknowledged(entries: Iterable[Entry]) -> set[int]:
    """Numbers of what must be there: what was acked, and what its worker did before: the log has an order."""
    numbers: set[int] = set()
    before: dict[str, list[int]] = {}
    for entry in entries:
        earlier = before.setdefault(entry.operation.worker, [])
        if entry.outcome == "acked":
            numbers.update(earlier, [entry.number])
            earlier.clear()
        elif entry.outcome == "relaxed":
            earlier.append(entry.number)
    return numbers
