"""What reclaiming log files gives and costs: disk and live bytes of a store that churns, and matches meanwhile.

    python -m bench.reclaim                       a sample trace, 6 rounds
    python -m bench.reclaim --rounds 20 --trace FILE

A trace is replayed again and again. Each round its sessions belong to other workers: what a worker of the round before
held is removed as the next one inserts it. So nearly all that is written replaces something, as in caches that evict.
Matches run all the time. Once without reclaiming, for comparison, and once with it; the stores must answer alike. The
sample is small, so log files and the log between two snapshots are 1 MiB, in proportion.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import numpy as np

from sarp_cluster.config import IndexConfig
from sarp_cluster.replay.request import Request
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import HashProfile, IndexStatistics, NamespaceSpec, Worker
from shard.index import Index
from shard.namespaces import IndexNamespace

SAMPLE = Path(__file__).parents[1] / "examples" / "sample" / "coding_agent_blocks.jsonl.gz"
WORKERS = 8
LOG_FILE_BYTES = 1 << 20
MATCHES_A_SECOND = 2_000


class Outcome(NamedTuple):
    """One run."""

    statistics: IndexStatistics
    files: int
    appended: int
    seconds: float
    match_us: np.ndarray
    answers: list[int]


async def churn(index: Index, namespace: IndexNamespace, requests: Sequence[Request], rounds: int) -> None:
    """Insert everything, `rounds` times, each time held by another worker than before."""
    for number in range(rounds):
        for request in requests:
            holder = Worker(f"worker-{(request.session + number) % WORKERS}")
            before = Worker(f"worker-{(request.session + number - 1) % WORKERS}")
            if number:
                await index.remove(namespace, request.sequence, worker=before, durable=False)
            await index.insert(namespace, request.sequence, worker=holder, durable=False)
            await asyncio.sleep(0)
        await index.store.sync()


async def match_on(index: Index, namespace: IndexNamespace, requests: Sequence[Request], times: list[float]) -> None:
    """Match at a steady rate, and note how late each answer came, from when its match was due."""
    due = perf_counter()
    number = 0
    while True:
        due += 1 / MATCHES_A_SECOND
        await asyncio.sleep(max(0.0, due - perf_counter()))
        began = perf_counter()
        await index.match(namespace, requests[number % len(requests)].context)
        times.append(perf_counter() - min(due, began))
        due = max(due, began)
        number += 1


async def run(requests: Sequence[Request], block_tokens: int, rounds: int, config: IndexConfig) -> Outcome:
    """Churn a new store and measure."""
    with TemporaryDirectory() as directory:
        index = await Index.open(Path(directory) / "store", config, secret=bytes(32))
        spec = NamespaceSpec(model="churn", hash_profile=HashProfile.OPAQUE, block_size=block_tokens)
        namespace = index.create_namespace(spec)
        times: list[float] = []
        gc.collect()
        gc.freeze()
        matching = asyncio.create_task(match_on(index, namespace, requests, times))
        began = perf_counter()
        await churn(index, namespace, requests, rounds)
        seconds = perf_counter() - began
        matching.cancel()
        await asyncio.wait([matching])
        await index.drain_backfill()
        await index.validate()
        answers = [(await index.match(namespace, request.sequence)).matched_blocks for request in requests]
        outcome = Outcome(
            index.statistics(),
            len(list((Path(directory) / "store").glob("log-*"))),
            index.store.bytes_appended,
            seconds,
            np.array(times) * 1e6,
            answers,
        )
        await index.close()
        return outcome


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=SAMPLE)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=int, default=2_000, help="requests of the trace")
    options = parser.parse_args()
    trace = open_trace(options.trace)
    with TemporaryDirectory() as directory:

        async def hashed() -> list[Request]:
            index = await Index.open(Path(directory), secret=bytes(32))
            namespace = index.create_namespace(NamespaceSpec(model="hash", block_size=trace.block_tokens))
            requests = list(trace.requests(namespace.block_ids, limit=options.limit))
            await index.close()
            return [request for request in requests if request.context and request.sequence]

        requests = asyncio.run(hashed())
    print(
        f"{'reclaiming':12}{'disk MB':>9}{'live MB':>9}{'disk/live':>11}{'files':>7}{'appended MB':>13}"
        f"{'rewritten MB':>14}{'changes/s':>11}{'match µs p50':>14}{'p99':>8}{'p99.9':>8}{'longest':>9}"
    )
    answers = []
    for name, ratio in (("off", None), ("on", IndexConfig().reclaim_ratio)):
        config = IndexConfig(log_file_bytes=LOG_FILE_BYTES, snapshot_log_bytes=LOG_FILE_BYTES, reclaim_ratio=ratio)
        done = asyncio.run(run(requests, trace.block_tokens, options.rounds, config))
        statistics = done.statistics
        changes = len(requests) * (2 * options.rounds - 1)
        print(
            f"{name:12}{statistics.disk_bytes / 1e6:9.1f}{statistics.live_disk_bytes / 1e6:9.1f}"
            f"{statistics.disk_bytes / statistics.live_disk_bytes:11.2f}{done.files:7}{done.appended / 1e6:13.1f}"
            f"{statistics.rewritten_bytes / 1e6:14.1f}{changes / done.seconds:11,.0f}"
            f"{np.percentile(done.match_us, 50):14.0f}{np.percentile(done.match_us, 99):8.0f}"
            f"{np.percentile(done.match_us, 99.9):8.0f}{done.match_us.max():9.0f}",
            flush=True,
        )
        answers.append(done.answers)
    if answers[0] != answers[1]:
        raise SystemExit("the two stores answer differently")


if __name__ == "__main__":
    main()
