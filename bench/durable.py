"""Durable inserts a second, with 1, 8 and 64 callers at once: our log beside a RocksDB with a record a block.

    python -m bench.durable                       three rounds of two seconds, medians
    python -m bench.durable --blocks 8 --seconds 5
    python -m bench.durable --json result.json

Each caller inserts sequences of new blocks, one after the other, and waits for each to be synced. All contestants get
the same sequences and take turns in one run. Ours searches the index first, RocksDB's blocks are put blindly. Syncs of
log files are counted: ours by the calls, RocksDB's by its own statistics. Beside them what the disk does by itself: an
append of the size of one of our inserts and an fdatasync, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from bench.baselines.rocksdb_block_hash import BlockHashStore, GroupCommit, LibRocksStore, RocksDictStore, c_library
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

SPEC = NamespaceSpec(model="durable", hash_profile=HashProfile.OPAQUE)
CALLERS = (1, 8, 64)
OURS = "SARP log"
DISK = "append + fdatasync"


class Load(NamedTuple):
    """What a contestant's turn consists of."""

    callers: int
    blocks: int
    seconds: float
    seed: int

    def sequences(self, caller: int) -> Iterator[bytes]:
        """New block IDs, the same each time."""
        rng = random.Random(f"{self.seed} {caller}")
        while True:
            yield rng.randbytes(8 * self.blocks)


class Result(NamedTuple):
    """One contestant's turn."""

    inserts_a_second: float
    syncs_a_second: float
    bytes_an_insert: float


Insert = Callable[[bytes, int], Awaitable[object]]
"""Insert block IDs that a worker holds; durable when it returns."""


async def keep_inserting(load: Load, insert: Insert) -> tuple[int, float]:
    """(inserts, seconds they took)."""
    done = 0
    end = perf_counter() + load.seconds

    async def call(number: int) -> None:
        nonlocal done
        for ids in load.sequences(number):
            await insert(ids, number)
            done += 1
            if perf_counter() > end:
                return

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(load.callers):
            group.create_task(call(number))
    return done, perf_counter() - began


@contextmanager
def counted_syncs() -> Iterator[Counter[str]]:
    """Counts the syncs that Python code of this process makes: of files (fdatasync), of directories (fsync)."""
    count: Counter[str] = Counter()
    originals = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def counting(name: str) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            count[name] += 1
            originals[name](descriptor)

        return sync

    try:
        for name in originals:
            setattr(os, name, counting(name))
        yield count
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


async def ours(directory: Path, load: Load) -> Result:
    """Our index."""
    index = await Index.open(directory)
    namespace = index.create_namespace(SPEC)
    workers = [Worker(f"worker-{number}") for number in range(load.callers)]

    async def insert(ids: bytes, worker: int) -> None:
        result = await index.insert(namespace, ids, worker=workers[worker])
        if not result.durable:
            raise SystemExit("an insert was answered before it was durable")

    with counted_syncs() as syncs:
        done, took = await keep_inserting(load, insert)
        synced = syncs["fdatasync"]
    found = await index.match(namespace, next(load.sequences(0)))
    if found.matched_blocks != load.blocks:
        raise SystemExit(f"{OURS}: only {found.matched_blocks} of {load.blocks} blocks are there")
    size = index.statistics().disk_bytes / done
    await index.close()
    return Result(done / took, synced / took, size)


async def rocksdb(store: BlockHashStore, load: Load) -> Result:
    """A RocksDB with a record a block."""
    commit = GroupCommit(store)
    done, took = await keep_inserting(load, commit.insert)
    if not store.contains(next(load.sequences(0)), 0):
        raise SystemExit(f"{store.name}: blocks are missing")
    result = Result(done / took, store.counted("synced") / took, store.counted("bytes") / done)
    commit.close()
    return result


def append(size: int, seconds: float, path: Path) -> float:
    """Appends with an fdatasync each, a second."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    data, done, began = bytes(size), 0, perf_counter()
    while perf_counter() - began < seconds:
        os.pwrite(descriptor, data, done * size)
        os.fdatasync(descriptor)
        done += 1
    os.close(descriptor)
    return done / (perf_counter() - began)


def contestants() -> dict[str, Callable[[Path], BlockHashStore] | None]:
    """Who takes part, by name; None: our index."""
    found: dict[str, Callable[[Path], BlockHashStore] | None] = {OURS: None}
    try:
        import rocksdict  # noqa: F401, PLC0415
    except ImportError:
        print("RocksDB (rocksdict) is left out: not installed (`make bench` installs the extra `bench`)")
    else:
        found[RocksDictStore.name] = RocksDictStore
    library = c_library()
    if library is None:
        print("RocksDB (C library) is left out: not installed (Debian: librocksdb7.8)")
    else:
        found[LibRocksStore.name] = lambda directory: LibRocksStore(directory, library)
    return found


def measure(options: argparse.Namespace, parent: Path) -> dict[tuple[int, str], list[Result]]:
    """All turns of all rounds."""
    results: dict[tuple[int, str], list[Result]] = {}
    players = contestants()
    for round_number in range(options.rounds):
        for callers in options.callers:
            order = list(players)
            for name in order[round_number % len(order) :] + order[: round_number % len(order)]:
                directory = parent / f"{round_number}-{callers}-{name.replace(' ', '-')}"
                directory.mkdir()
                load = Load(callers, options.blocks, options.seconds, round_number)
                make = players[name]
                run = ours(directory, load) if make is None else rocksdb(make(directory), load)
                results.setdefault((callers, name), []).append(asyncio.run(run))
        size = int(results[options.callers[0], OURS][-1].bytes_an_insert)
        rate = append(size, options.seconds, parent / f"{round_number}-plain")
        results.setdefault((1, DISK), []).append(Result(rate, rate, size))
    return results


def rows(results: dict[tuple[int, str], list[Result]], blocks: int) -> Iterator[dict[str, Any]]:
    """Medians, with each contestant's ratio to ours."""
    for (callers, name), turns in sorted(results.items(), key=lambda item: item[0][0]):
        inserts, syncs, size = (median(column) for column in zip(*turns, strict=True))
        ours_inserts = median(turn.inserts_a_second for turn in results[callers, OURS])
        yield {
            "callers": callers,
            "contestant": name,
            "inserts_a_second": inserts,
            "blocks_a_second": inserts * blocks,
            "syncs_a_second": syncs,
            "inserts_a_sync": inserts / max(syncs, 1e-9),
            "log_bytes_an_insert": size,
            "ours_is_faster_by": ours_inserts / inserts,
        }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="new blocks an insert (default: %(default)s)")
    parser.add_argument("--callers", type=int, nargs="+", default=CALLERS, help="callers at once (default: 1 8 64)")
    parser.add_argument("--seconds", type=float, default=2, help="of each turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are taken (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="on the disk that is measured (default: a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.dir) as directory:
        table = list(rows(measure(options, Path(directory)), options.blocks))
    print(
        "| callers | | inserts a second | blocks a second | syncs a second | inserts a sync | log bytes an insert "
        "| SARP is faster by |"
    )
    print("|---" * 8 + "|")
    for row in table:
        print(
            f"| {row['callers']} | {row['contestant']} | {row['inserts_a_second']:,.0f} "
            f"| {row['blocks_a_second']:,.0f} | {row['syncs_a_second']:,.0f} | {row['inserts_a_sync']:.1f} "
            f"| {row['log_bytes_an_insert']:,.0f} | {row['ours_is_faster_by']:.2f} × |"
        )
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
