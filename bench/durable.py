"""Durable inserts a second, with 1, 8 and 64 callers at once: what group commit gives.

    python -m bench.durable

Each caller inserts sequences of new blocks, one after the other, and waits for each to be synced. Beside it what the
disk does by itself: an append of the same size and an fdatasync, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

BLOCKS = 64


async def insert(callers: int, seconds: float, directory: Path) -> tuple[float, float]:
    """(inserts a second, bytes of log an insert)."""
    index = await Index.open(directory)
    namespace = index.create_namespace(NamespaceSpec(model="durable", hash_profile=HashProfile.OPAQUE))
    done = 0
    end = perf_counter() + seconds

    async def call(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        while perf_counter() < end:
            result = await index.insert(namespace, rng.randbytes(8 * BLOCKS), worker=Worker(f"worker-{number}"))
            if not result.durable:
                raise SystemExit("an insert was answered before it was durable")
            done += 1

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(call(number))
    rate = done / (perf_counter() - began)
    size = index.statistics().disk_bytes / done
    await index.close()
    return rate, size


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    print(f"{'':28}{'a second':>12}{'log bytes each':>16}")
    with TemporaryDirectory() as directory:
        size = 0.0
        for callers in (1, 8, 64):
            rate, size = asyncio.run(insert(callers, options.seconds, Path(directory) / f"store-{callers}"))
            print(f"{callers:3} callers                 {rate:12,.0f}{size:16,.0f}", flush=True)
        rate = append(int(size), options.seconds, Path(directory) / "plain")
        print(f"{'append + fdatasync, alone':28}{rate:12,.0f}{int(size):16,}")


if __name__ == "__main__":
    main()
