"""A program to be killed: it changes a store at random, by a seed, and keeps a ledger of what it was promised.

    python -m tests.crash.driver STORE LEDGER [--seed N] [--operations N] [--tasks N] [--pure] [--own-secret]
    python -m tests.crash.driver STORE LEDGER --burst      leaves a long tail that was never synced, and kills itself
    python -m tests.crash.driver STORE LEDGER --reopen     only opens the store and closes it again

Prints "ready" when the store is open. Exit status 3: the store was poisoned.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Final

from sarp_cluster.errors import StorageError, StorePoisonedError
from sarp_cluster.storage import log
from sarp_cluster.storage.log import LogStore
from shard.index import Index
from shard.namespaces import IndexNamespace
from tests.crash.ledger import CONFIG, SECRET, SPEC, Ledger, Notes, Operation

EXIT_POISONED: Final = 3
TOKENS_MAX: Final = 48
BURST_OPERATIONS: Final = 60


class Driver:
    """Changes to one index by several tasks, each with two workers of its own."""

    def __init__(self, index: Index, namespace: IndexNamespace, ledger: Notes, seed: int) -> None:
        self.index = index
        self.namespace = namespace
        self.ledger = ledger
        self.seed = seed
        self.known: list[tuple[int, ...]] = []
        # Workers of an earlier run are left alone: what became of their last changes is unknown.
        self.run = ledger.next

    async def task(self, task: int, operations: int, *, pure: bool) -> None:
        """Some operations, one after the other."""
        rng = random.Random(f"{self.seed}/{task}")
        generations = {f"worker-{self.run}-{task}-{i}": 0 for i in range(2)}
        for _ in range(operations):
            worker = rng.choice(list(generations))
            await self.apply(self.draw(rng, worker, generations, pure=pure))

    def draw(self, rng: random.Random, worker: str, generations: dict[str, int], *, pure: bool) -> Operation:
        """The next operation of a worker."""
        kind = rng.random()
        if not pure and kind < 0.04:
            generations[worker] += 1
            return Operation("clear", worker, generations[worker])
        if not pure and kind < 0.16 and self.known:
            tokens = rng.choice(self.known)
            first = rng.randrange(len(tokens))
            last = rng.randint(first + 1, len(tokens))
            tier = rng.choice((None, 0, 1))
            return Operation("remove", worker, generations[worker], tokens, tier, first, last)
        tokens = self._sequence(rng)
        first = rng.randrange(len(tokens)) if rng.random() < 0.2 else 0
        handle = self.ledger.next if rng.random() < 0.5 else None
        durable = rng.random() < 0.8
        return Operation(
            "insert", worker, generations[worker], tokens, rng.randrange(2), first, handle=handle, durable=durable
        )

    def _sequence(self, rng: random.Random) -> tuple[int, ...]:
        """A new sequence, or one that extends a known one, repeats it, or parts from it somewhere."""
        base: tuple[int, ...] = ()
        if self.known and rng.random() < 0.7:
            base = rng.choice(self.known)
            if rng.random() < 0.5:
                base = base[: rng.randint(1, len(base))]
        tokens = (base + tuple(rng.randrange(3) for _ in range(rng.randint(1, 20))))[:TOKENS_MAX]
        self.known.append(tokens)
        return tokens

    async def apply(self, operation: Operation) -> None:
        """Do it, and keep the ledger."""
        number = self.ledger.pending(operation)
        try:
            if operation.kind == "clear":
                await self.index.clear_worker(operation.holder, **operation.arguments())
            else:
                change = self.index.insert if operation.kind == "insert" else self.index.remove
                arguments = operation.arguments()
                await change(self.namespace, operation.block_ids, **arguments, durable=operation.durable)
        except StorageError:
            self.ledger.answered(number, "refused")
            raise
        self.ledger.answered(number, "acked" if operation.durable else "relaxed")

    async def burst(self) -> None:
        """Something durable; then much that is written but not synced; then the end."""
        rng = random.Random(self.seed)
        for i in range(4):
            await self.apply(Operation("insert", f"durable-{self.run}-{i}", 0, self._sequence(rng)))
        await self.index.stop_background()  # reclaiming syncs,
        log.RELAXED_SYNC_MS = 3_600_000  # type: ignore[misc]  # and so would a busy machine before this is at its end
        for i in range(BURST_OPERATIONS):
            tokens = tuple(rng.randrange(3) for _ in range(TOKENS_MAX))
            await self.apply(Operation("insert", f"relaxed-{self.run}-{i}", 0, tokens, durable=False))
        store = self.index.store
        while isinstance(store, LogStore) and store._tail.unwritten_bytes:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


async def run(arguments: argparse.Namespace) -> None:
    """Open the store and do as the arguments say."""
    index = await Index.open(arguments.store, CONFIG, secret=None if arguments.own_secret else SECRET)
    try:
        print("ready", flush=True)  # noqa: T201
        if arguments.reopen:
            return
        driver = Driver(index, index.create_namespace(SPEC), Ledger(arguments.ledger), arguments.seed)
        if arguments.burst:
            await index.stop_background()  # which syncs
            await driver.burst()
        tasks = [driver.task(i, arguments.operations, pure=arguments.pure) for i in range(arguments.tasks)]
        await asyncio.gather(*tasks)
    finally:
        await index.close()


def main() -> int:
    """Run the driver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=100, help="of each task")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--pure", action="store_true", help="inserts only")
    parser.add_argument("--own-secret", action="store_true", help="the store makes and keeps its secret")
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--reopen", action="store_true")
    try:
        asyncio.run(run(parser.parse_args()))
    except StorePoisonedError as error:
        print(f"poisoned: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_POISONED
    return 0


if __name__ == "__main__":
    sys.exit(main())
