"""What the driver did and was told: one line each, written before it goes on, for the oracle in another process.

A change has a `Begun` before it is first sent and an `Ended` when it is known what became of it: acked, or refused with
the word that it was not applied. Between the two, and for ever if there is no `Ended`, it may be in the index or not.
Each answer on the way there has a `Tried`. A match has an `Asked` once it is answered. Times are of the monotonic
clock, which all processes of a machine share.

Lines are written without a sync: processes are killed here, not the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["insert", "remove", "clear"]
How: TypeAlias = Literal["acked", "refused"]


class _Line(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    pass


class Begun(_Line, frozen=True, tag="begun", kw_only=True):
    """A change of a worker's: blocks [first, last) of a session. A worker's changes follow one another."""

    number: int
    at: float
    worker: str
    kind: Kind
    session: int = 0
    first: int = 0
    last: int = 0
    generation: int = 0


class Ended(_Line, frozen=True, tag="ended", kw_only=True):
    """It is known what became of a change."""

    number: int
    at: float
    how: How
    generation: int = 0
    """The one that a clear began."""


class Tried(_Line, frozen=True, tag="tried", kw_only=True):
    """A change was answered with an error, or not in time."""

    number: int
    at: float
    took_s: float
    limit_s: float
    """By then there had to be an answer."""
    code: str
    outcome: str


class Asked(_Line, frozen=True, tag="asked", kw_only=True):
    """A match of a session's first blocks, and its answer."""

    began: float
    ended: float
    phase: str
    session: int
    blocks: int
    wire: str
    failed: str = ""
    """Why there is no answer."""
    matched: int = 0
    workers: dict[str, int] = {}
    """How many blocks each holds."""
    complete: bool = False
    degraded: tuple[str, ...] = ()


Line: TypeAlias = Begun | Ended | Tried | Asked


class Ledger:
    """Appends to a ledger."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._encoder = msgspec.json.Encoder()
        self._next = 0

    def number(self) -> int:
        """Of the next change."""
        self._next += 1
        return self._next

    def write(self, line: Line) -> None:
        os.write(self._descriptor, self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def read_ledger(path: Path) -> Iterator[Line]:
    """All lines but one that was cut off."""
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)
