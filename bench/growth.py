"""Does anything stop while an index grows? Longest single insert up to 5 million entries, and under one hot key.

    python -m bench.growth                        both parts, a table
    python -m bench.growth --entries 1000000

Part one inserts sequences of one block, each a segment and a routing entry of its own. Part two inserts sequences
that share their first block and part right after it, so that all their references stand in one posting list.
Background work (back-fill, merging the overlay into the base) runs between inserts, as it does in a shard, and is
timed by the step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns

import numpy as np

from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

SLICE = 64
"""Inserts between two looks at the background work."""


SYNC_INSERTS = 4_096
"""Inserts between two syncs of the log."""


async def grow(inserts: int, shared: bytes, directory: Path) -> tuple[np.ndarray, np.ndarray, Index]:
    """Nanoseconds of each insert and of each step of background work."""
    index = await Index.open(directory, secret=bytes(32))
    namespace = index.create_namespace(NamespaceSpec(model="growth", hash_profile=HashProfile.OPAQUE))
    worker = Worker("worker-0")
    rng = random.Random(1)
    times = np.zeros(inserts, np.int64)
    steps: list[int] = []
    for number in range(inserts):
        ids = shared + rng.randbytes(8)
        begin = perf_counter_ns()
        await index.insert(namespace, ids, worker=worker, durable=False)
        times[number] = perf_counter_ns() - begin
        if number % SLICE == 0:
            begin = perf_counter_ns()
            if await index.backfill_step():
                steps.append(perf_counter_ns() - begin)
            await asyncio.sleep(0)
        if number % SYNC_INSERTS == 0:
            await index.store.sync()  # as clients that wait for it would have it; not measured
    return times, np.array(steps or [0]), index


async def report(title: str, inserts: int, shared: bytes) -> None:
    """Run one part and print its row."""
    with TemporaryDirectory() as directory:
        gc.collect()
        gc.disable()
        times, steps, index = await grow(inserts, shared, Path(directory) / "store")
        gc.enable()
        statistics = index.statistics()
        late = times[-len(times) // 10 :] / 1e3
        print(
            f"{title:24}{statistics.registrations:12,}"
            f"{times.mean() / 1e3:10.1f}{np.percentile(times, 99.9) / 1e3:10.1f}"
            f"{times.max() / 1e3:10.1f}{late.mean():12.1f}{steps.max() / 1e3:12.1f}"
            f"{statistics.resident_bytes / statistics.registrations:10.1f}",
            flush=True,
        )
        await index.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=5_000_000, help="routing entries of the first part")
    parser.add_argument("--hot", type=int, default=1_000_000, help="references under one key of the second part")
    options = parser.parse_args()
    print(
        f"{'insert, µs':24}{'references':>12}{'mean':>10}{'p99.9':>10}{'longest':>10}{'last tenth':>12}"
        f"{'long. step':>12}{'bytes/ref':>10}"
    )
    asyncio.run(report("an entry each", options.entries, b""))
    asyncio.run(report("all under one key", options.hot, bytes(8)))


if __name__ == "__main__":
    main()
