"""A workload in named steps that meets every kind of change of a store, recorded by a crashable file system.

A step is a coroutine over a `Workload`. To have more crashed, append to STEPS: whatever calls methods of an index joins
in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import StoreFullError
from sarp_cluster.storage.log import LogStore
from sarp_cluster.testing.crash_file_system import CrashFileSystem, Fault
from shard.index import Index
from tests.crash.driver import TOKENS_MAX, Driver
from tests.crash.ledger import CONFIG, SECRET, SPEC, Entry, Operation, TimedLedger

STORE_NAME: Final = "store"


class Workload:
    """An index over a CrashFileSystem, changed by a driver that keeps a ledger by the record's positions.

    `log_alone`: without snapshots and reclaiming. They sync all the time, and hide what others leave out.
    """

    def __init__(
        self,
        root: Path,
        seed: int,
        *,
        before: Sequence[Entry] = (),
        fault: Fault | None = None,
        log_alone: bool = False,
    ) -> None:
        self.seed = seed
        self.log_alone = log_alone
        self.rng = random.Random(f"{seed}/workload")
        self.store = root / STORE_NAME
        # A store of its own secret makes one more file. It is drawn, too, so that the same seed is the same workload.
        self.secret: bytes | None = SECRET if seed % 2 else None
        self.config: IndexConfig = dataclasses.replace(
            CONFIG,
            log_file_bytes=self.rng.choice((4_096, 8_192, 16_384)),
            snapshot_log_bytes=1 << 20 if log_alone else self.rng.choice((6_000, 1 << 20)),
            reclaim_ratio=None if log_alone else 1.1,
        )
        self.files = CrashFileSystem(root, fault)
        self.ledger = TimedLedger(lambda: self.files.position, before)
        self.began: list[tuple[int, str]] = []
        """At which position of the record each step began."""
        self.known: list[tuple[int, ...]] = [entry.operation.tokens for entry in before if entry.operation.tokens]
        """Sequences to extend, repeat, or part from."""
        self._index: Index | None = None
        self._driver: Driver | None = None
        self._refused = 0

    @property
    def index(self) -> Index:
        """The open index."""
        assert self._index is not None
        return self._index

    @property
    def driver(self) -> Driver:
        """The driver of the open index."""
        assert self._driver is not None
        return self._driver

    async def open(self) -> None:
        """Open the index, and go on with the ledger."""
        with patch.object(os, "urandom", self.rng.randbytes):
            self._index = await Index.open(self.store, self.config, secret=self.secret, file_system=self.files)
        self._driver = Driver(self._index, self._index.create_namespace(SPEC), self.ledger, self.seed)
        self._driver.known = self.known

    async def close(self) -> None:
        """Close the index: all that was answered is durable."""
        index, self._index = self.index, None
        try:
            await index.close()
        except StoreFullError:
            self.ledger.settle("refused")
        else:
            self.ledger.settle("acked")

    async def kill(self) -> None:
        """End as a process that is killed: what was not written is gone, what was is in the page cache."""
        index, self._index = self.index, None
        assert isinstance(index.store, LogStore)
        index.store._told = True  # it writes no more
        await index.close()
        self.ledger.settle("refused")

    async def run(self, steps: tuple[Step, ...]) -> None:
        """Do the steps; the store is closed afterwards, whatever became of them."""
        await self.open()
        try:
            for name, step in steps:
                self.began.append((self.files.position, name))
                await step(self)
        except BaseException:
            if self._index is not None:
                await self._index.close()
            raise
        await self.close()

    def step_at(self, position: int) -> str:
        """Name of the step that a position of the record belongs to."""
        return next((name for begin, name in reversed(self.began) if begin <= position), "opening")

    def draw(self) -> tuple[int, ...]:
        """A known sequence."""
        return self.rng.choice(self.known or [(0, 1, 2)])

    async def insert(self, worker: str, base: tuple[int, ...], fresh: int, *, durable: bool = True) -> None:
        """A worker holds a sequence that begins with `base` and goes on with `fresh` blocks drawn at random."""
        tokens = (base + tuple(self.rng.randrange(3) for _ in range(fresh)))[:TOKENS_MAX]
        self.known.append(tokens)
        handle = self.rng.choice((None, self.ledger.next))
        tier = self.rng.randrange(2)
        await self.change("insert", worker, 0, tokens, tier, handle=handle, durable=durable)

    async def change(self, kind: str, worker: str, *arguments: Any, **named: Any) -> None:
        """An operation of a worker: another one each time the store is opened, and after one that was refused.

        What became of that, or of what was in flight, is not known, and the next one would build on it.
        """
        name = f"{worker}-{self.driver.run}-{self._refused}"
        try:
            await self.driver.apply(Operation(kind, name, *arguments, **named))
        except StoreFullError:
            self._refused += 1


class Step(NamedTuple):
    """A part of a workload."""

    name: str
    step: Callable[[Workload], Awaitable[None]]


@asynccontextmanager
async def _space_or_not() -> AsyncIterator[None]:
    """Background work that finds no space is done later."""
    try:
        yield
    except StoreFullError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


async def insert(workload: Workload) -> None:
    """New sequences."""
    for i in range(4):
        await workload.insert(f"insert-{i % 2}", (), workload.rng.randint(1, 20))


async def extend(workload: Workload) -> None:
    """Known sequences go on: deltas, then full segments and their children."""
    for i in range(6):
        known = workload.draw()
        await workload.insert(f"extend-{i % 2}", known, workload.rng.randint(1, 9))


async def diverge(workload: Workload) -> None:
    """Sequences part from known ones: copies with an origin."""
    for i in range(5):
        known = workload.draw()
        await workload.insert(f"diverge-{i % 2}", known[: workload.rng.randint(0, len(known))], 5)


async def remove(workload: Workload) -> None:
    """Held at first, then parts of it are not."""
    for i in range(4):
        worker, tokens = f"remove-{i}", workload.draw()
        await workload.change("insert", worker, 0, tokens, handle=i)
        first = workload.rng.randrange(len(tokens))
        tier = workload.rng.choice((None, 0))
        await workload.change("remove", worker, 0, tokens, tier, first, durable=i != 2)


async def clear(workload: Workload) -> None:
    """A worker's cache ends and begins again."""
    for generation in range(2):
        for i in range(2):
            tokens = workload.draw()
            await workload.change("insert", f"clear-{i}", generation, tokens)
            await workload.change("clear", f"clear-{i}", generation + 1)


async def relaxed(workload: Workload) -> None:
    """Much that nobody waits for: several files of it, synced some time later."""
    for i in range(12):
        await workload.insert(f"relaxed-{i % 3}", (), TOKENS_MAX, durable=False)
    await asyncio.sleep(0.01)  # of virtual time: it is written
    for i in range(4):
        await workload.insert(f"relaxed-{i % 3}", (), TOKENS_MAX, durable=False)
    await asyncio.sleep(0.2)  # and synced
    await workload.insert("relaxed-0", (), 3, durable=False)


async def background(workload: Workload) -> None:
    """Back-fills, folds, snapshots, merges, reclaiming: all that is due, unless the store is full."""
    async with _space_or_not():
        await workload.index.drain_backfill()


async def snapshot(workload: Workload) -> None:
    """A snapshot, changes while it is taken, and changes after it."""
    if workload.log_alone:
        return

    async def meanwhile() -> None:
        for i in range(3):
            tokens = workload.draw()
            await workload.insert("snapshot", tokens, 5)
            await workload.change("remove", "snapshot", 0, tokens, None, 0, durable=i > 0)
            await workload.change("insert", f"snapshot-{i}", 0, tokens)
            await workload.change("clear", f"snapshot-{i}", 1)

    async with _space_or_not():
        changes = asyncio.create_task(meanwhile())
        try:
            await workload.index.snapshot()
        finally:
            await changes
    await workload.insert("snapshot", workload.draw(), 7)


async def reopen(workload: Workload) -> None:
    """Closed, recovered, gone on with."""
    await workload.close()
    await workload.open()


async def mixed(workload: Workload) -> None:
    """Several tasks at once: groups of several, operations in flight."""
    tasks = [workload.driver.task(i, 6, pure=False) for i in range(4)]
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, StoreFullError):
            raise outcome


async def killed(workload: Workload) -> None:
    """Much that was written and not synced; the process ends, and another builds on what it finds."""
    for i in range(6):
        await workload.insert(f"killed-{i % 2}", (), TOKENS_MAX, durable=False)
    await asyncio.sleep(0.01)
    await workload.kill()
    await workload.open()
    for i in range(3):
        await workload.insert(f"survivor-{i}", workload.known[-1 - i], 2)


async def later(workload: Workload) -> None:
    """Nothing for a while: a full store has looked for space again, and again."""
    for _ in range(2):
        await asyncio.sleep(10)
        await insert(workload)


STEPS: Final = (
    Step("insert", insert),
    Step("extend", extend),
    Step("relaxed", relaxed),
    Step("diverge", diverge),
    Step("background", background),
    Step("snapshot", snapshot),
    Step("killed", killed),
    Step("remove", remove),
    Step("reopen", reopen),
    Step("mixed", mixed),
    Step("clear", clear),
    Step("background again", background),
    Step("snapshot again", snapshot),
    Step("reopen again", reopen),
    Step("later", later),
)
AFTERWARDS: Final = (
    Step("afterwards", extend),
    Step("snapshot afterwards", snapshot),
    Step("background afterwards", background),
)
"""What a recovered store goes on with."""
