"""How long a match waits while snapshots are taken and runs are merged: p50, p99, p99.9 and the longest.

    python -m bench.snapshot_stall                    a store of 1e7 blocks
    python -m bench.snapshot_stall --blocks 1e6 --seconds 10

The store is filled by inserts, with its background work on, as a shard's is. Then a match is due every millisecond,
whether the one before is done or not; its latency counts from when it was due, so that a stop of the event loop counts
for all that were due in it. Inserts go on beside them, as fast as is given. Three phases: neither snapshot nor merge;
snapshots one after the other; merges of runs, and of all of them into one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, perf_counter_ns
from typing import Final, NamedTuple

import numpy as np
import uvloop
from tqdm import tqdm  # type: ignore[import-untyped]

from bench.hot_match import CHAT, Request, synthetic
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index
from shard.namespaces import IndexNamespace

BLOCKS_A_CONVERSATION: Final = 184
DUE_EVERY_NS: Final = 1_000_000
ROW: Final = "{:<24}{:>9}{:>10}{:>10}{:>10}{:>12}{:>14}"


async def insert(index: Index, namespace: IndexNamespace, request: Request) -> None:
    """What the serving worker newly holds."""
    worker = Worker(f"worker-{request.worker}")
    await index.insert(namespace, request.sequence, worker=worker, first=request.first, durable=False)


async def fill(index: Index, namespace: IndexNamespace, blocks: int, requests: Iterator[Request]) -> list[bytes]:
    """Insert until there are so many blocks. Returns some of the contexts."""
    kept: list[bytes] = []
    with tqdm(total=blocks, unit="block", unit_scale=True, desc="fill") as bar:
        for count, request in enumerate(requests):
            await insert(index, namespace, request)
            await asyncio.sleep(0)  # as a server's loop does, so that back-fills run
            if count % 64 == 0:
                kept.append(request.ids)
                now = index.state.table.blocks
                bar.update(now - bar.n)
                if now >= blocks:
                    break
    return kept


async def ask(
    index: Index, namespace: IndexNamespace, contexts: list[bytes], until: Callable[[], bool], latencies: list[int]
) -> None:
    """A match each millisecond, as long as `until` is not true."""
    rng = random.Random(3)
    due = perf_counter_ns()
    while not until():
        while (now := perf_counter_ns()) < due:
            await asyncio.sleep((due - now) / 1e9)
        await index.match(namespace, rng.choice(contexts))
        latencies.append(perf_counter_ns() - due)
        due += DUE_EVERY_NS


async def write(
    index: Index, namespace: IndexNamespace, requests: Iterator[Request], rate: float, until: Callable[[], bool]
) -> None:
    """Inserts, so many a second."""
    begin, done = perf_counter(), 0
    while not until():
        while done < (perf_counter() - begin) * rate:
            await insert(index, namespace, next(requests))
            done += 1
        await asyncio.sleep(0.002)


class Load(NamedTuple):
    """What goes on in each phase."""

    served: Index
    namespace: IndexNamespace
    contexts: list[bytes]
    requests: Iterator[Request]


async def phase(
    load: Load, arguments: argparse.Namespace, work: Callable[[], Awaitable[object]] | None = None
) -> tuple[list[int], int]:
    """Latencies while `work` is done again and again, and how often it was."""
    index, namespace, contexts, requests = load
    latencies: list[int] = []
    ended = False
    end = perf_counter() + arguments.seconds

    def over() -> bool:
        return ended

    gc.collect()
    gc.freeze()
    tasks = [
        asyncio.create_task(ask(index, namespace, contexts, over, latencies)),
        asyncio.create_task(write(index, namespace, requests, arguments.inserts, over)),
    ]
    done = 0
    while perf_counter() < end:
        if work is None:
            await asyncio.sleep(0.1)
        else:
            await asyncio.sleep(0.05)
            await work()
            done += 1
    ended = True
    await asyncio.gather(*tasks)
    return latencies, done


def report(name: str, latencies: list[int], done: int) -> None:
    """One row."""
    p50, p99, p999 = np.percentile(latencies, [50, 99, 99.9]) / 1e6
    cells = [f"{p50:.3f}", f"{p99:.3f}", f"{p999:.3f}", f"{max(latencies) / 1e6:.3f}"]
    print(ROW.format(name, len(latencies), *cells, done or ""), flush=True)


async def run(arguments: argparse.Namespace, directory: Path) -> None:
    """Fill, then measure."""
    index = await Index.open(directory / "store")
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    conversations = int(2 * arguments.blocks / BLOCKS_A_CONVERSATION) + 10_000
    requests = synthetic(replace(CHAT, conversations=conversations, open_conversations=512))
    begin = perf_counter()
    contexts = await fill(index, namespace, int(arguments.blocks), requests)
    await index.drain_backfill()
    statistics, taken = index.statistics(), index.snapshots.taken
    print(
        f"{statistics.blocks:,} blocks in {statistics.segments:,} segments, {perf_counter() - begin:.0f} s to fill, "
        f"{taken} snapshots; run files {index.snapshots.bytes_written / 1e6:.0f} MB written in all, "
        f"log {statistics.disk_bytes / 1e6:.0f} MB"
    )
    await index.stop_background()

    async def merge() -> None:
        """A small run to merge, then all runs into one."""
        await index.snapshot()
        await index.snapshots.merge(len(index.state.directory.runs))

    print(ROW.format("ms", "matches", "p50", "p99", "p99.9", "longest", "done"))
    load = Load(index, namespace, contexts, requests)
    report("neither", *await phase(load, arguments))
    report("snapshots", *await phase(load, arguments, index.snapshot))
    report("merges of everything", *await phase(load, arguments, merge))
    runs = [run.postings for run in index.state.directory.runs]
    snapshot_bytes = sum(entry.bytes for entry in (index.snapshots.newest.runs if index.snapshots.newest else ()))
    print(f"runs {runs}; the snapshot takes {snapshot_bytes / index.statistics().blocks:.2f} bytes a block")
    await index.close()


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=float, default=1e7, help="size of the store (default: %(default)g)")
    parser.add_argument("--seconds", type=float, default=20, help="of each phase (default: %(default)g)")
    parser.add_argument(
        "--inserts", type=float, default=500, help="a second, beside the matches (default: %(default)g)"
    )
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        uvloop.run(run(arguments, Path(directory)))


if __name__ == "__main__":
    main()
