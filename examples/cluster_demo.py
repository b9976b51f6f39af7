"""A cluster at work, and a shard killed in the middle: `python examples/cluster_demo.py`.

Starts a router, three shards and their coordinator, each a process of its own, and replays two sample traces through
several clients at once: each request matches its context, then its worker inserts what it computed. In the middle one
shard gets SIGKILL; its supervisor starts it again. In the end every acknowledged insert is looked up. Exit status 1 if
one is missing, if a match failed, or if an answer was longer than what had been inserted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Final

import aiohttp

from sarp_cluster.client import AsyncClient, CallError, Namespace, WorkerWriter
from sarp_cluster.replay.oracle import PrefixOracle
from sarp_cluster.replay.request import Request
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import HashProfile
from sarp_cluster.up import LocalCluster, Ports, running

SAMPLES: Final = Path(__file__).parent / "sample"
TRACES: Final = ("sharegpt_short.ktrc.zst", "coding_agent_blocks.jsonl.gz")
REQUESTS: Final = 6_000
CLIENTS: Final = 12
WORKERS: Final = 12
KILLED: Final = "shard-1"
PAUSE_S: Final = 0.02
"""Of a client between two requests."""
DEADLINE_MS: Final = 250
READY_POLL_S: Final = 0.01


@dataclass
class Phase:
    """What clients saw in one part of the run."""

    name: str
    matches: int = 0
    complete: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    found: int = 0
    exact: int = 0
    latencies_ms: list[float] = field(default_factory=list)

    def line(self) -> str:
        """One row of the table."""
        rate = self.found / self.exact if self.exact else 1.0
        times = sorted(self.latencies_ms) or [0.0]
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        return (
            f"  {self.name:<18}{self.matches:>8,}{self.complete:>10,}{self.failed:>8,}{rate:>12.2%}"
            f"{times[len(times) // 2]:>10.2f}{times[len(times) * 99 // 100]:>8.1f}   {reasons}"
        )


class Replay:
    """The clients' work, and what they remember of it."""

    def __init__(self) -> None:
        self.phases = [Phase("before")]
        self.acknowledged: list[tuple[Namespace, str, bytes]] = []
        self.oracles: dict[str, PrefixOracle] = {}
        self.begun: dict[str, PrefixOracle] = {}
        self.inserting: set[asyncio.Task[None]] = set()
        self.done = 0
        self.too_long = 0
        self.killed_at = 0.0

    @property
    def phase(self) -> Phase:
        """The present one."""
        return self.phases[-1]

    def enter(self, name: str) -> None:
        """The next phase begins."""
        self.phases.append(Phase(name))

    async def request(
        self, client: AsyncClient, namespace: Namespace, writer: WorkerWriter, worker: str, request: Request
    ) -> None:
        """Match, then insert until it is acknowledged."""
        phase = self.phase
        exact = self.oracles[namespace.id].matched_blocks(request.context)
        phase.matches += 1
        began = perf_counter()
        try:
            answer = await client.match(namespace, block_ids=request.context, deadline_ms=DEADLINE_MS)
        except CallError as error:
            phase.failed += 1
            phase.reasons[error.code] += 1
        else:
            phase.latencies_ms.append((perf_counter() - began) * 1e3)
            phase.complete += answer.complete
            phase.reasons.update(answer.degraded)
            phase.exact += exact
            phase.found += min(answer.matched_blocks, exact)
            self.too_long += answer.matched_blocks > self.begun[namespace.id].matched_blocks(request.context)
        if request.sequence_blocks > request.first:
            self.begun[namespace.id].insert(request.sequence)
            # A GPU goes on with the next request meanwhile.
            inserting = asyncio.create_task(self._insert(namespace, writer, worker, request))
            self.inserting.add(inserting)
            inserting.add_done_callback(self.inserting.discard)
        self.done += 1

    async def _insert(self, namespace: Namespace, writer: WorkerWriter, worker: str, request: Request) -> None:
        await writer.insert(namespace, block_ids=request.sequence, first=request.first)
        self.oracles[namespace.id].insert(request.sequence)
        self.acknowledged.append((namespace, worker, request.sequence))


async def demonstrate(directory: Path, requests: int, killed: str) -> int:
    """Run it all; returns the exit status."""
    cluster = LocalCluster(directory=directory, ports=Ports.free(3, 1))
    began = perf_counter()
    async with running(cluster), contextlib.AsyncExitStack() as stack:
        say(f"A cluster of 3 shards, 1 router and 1 coordinator is ready after {perf_counter() - began:.1f} s.")
        replay = Replay()
        urls = (cluster.router_streams[0], cluster.router_urls[0])
        clients = [await stack.enter_async_context(AsyncClient(urls[number % 2])) for number in range(CLIENTS)]
        writers = {}
        for number in range(WORKERS):
            worker = f"gpu-{number}"
            await clients[0].register_worker(worker)
            writers[worker] = await stack.enter_async_context(clients[number % CLIENTS].writer(worker))
        queues = await prepare(clients[0], replay, requests)
        total = sum(map(len, queues))
        say(f"{CLIENTS} clients, half by HTTP, half by stream, replay {total:,} requests of {len(TRACES)} real traces.")

        async def client_loop(number: int) -> None:
            queue, worker = queues[number], f"gpu-{number % WORKERS}"
            while queue:
                namespace, request = queue.popleft()
                await replay.request(clients[number], namespace, writers[worker], worker, request)
                await asyncio.sleep(PAUSE_S)

        working = [asyncio.create_task(client_loop(number)) for number in range(CLIENTS)]
        nemesis = asyncio.create_task(kill_in_the_middle(cluster, replay, total // 2, killed))
        await asyncio.gather(*working)
        await asyncio.gather(*replay.inserting)
        back_s = await nemesis
        missing = await look_up(clients[0], replay)
        say("                     matches  complete  failed  of an exact    ms p50     p99   why not complete")
        for phase in replay.phases:
            say(phase.line())
        say(f"{killed} served again {back_s:.2f} s after SIGKILL.")
        await tell_story(clients[0], replay.killed_at)
        say(f"Acknowledged inserts: {len(replay.acknowledged):,}; lost: {missing:,}.")
        failed = sum(phase.failed for phase in replay.phases)
        say(f"Matches that failed: {failed:,}; answers longer than what was inserted: {replay.too_long:,}.")
        return 1 if missing or failed or replay.too_long else 0


async def prepare(client: AsyncClient, replay: Replay, requests: int) -> list[deque[tuple[Namespace, Request]]]:
    """Each client's requests: a session stays with one client."""
    queues: list[deque[tuple[Namespace, Request]]] = [deque() for _ in range(CLIENTS)]
    for name in TRACES:
        trace = await asyncio.to_thread(open_trace, SAMPLES / name)
        profile = HashProfile.XXH3 if trace.kind == "tokens" else HashProfile.OPAQUE
        namespace = await client.namespace(trace.name, block_size=trace.block_tokens, hash_profile=profile)
        replay.oracles[namespace.id], replay.begun[namespace.id] = PrefixOracle(), PrefixOracle()
        hashed: Callable[[bytes], bytes] = namespace.block_ids
        for number, request in enumerate(trace.requests(hashed)):
            if number >= requests // len(TRACES):
                break
            queues[request.session % CLIENTS].append((namespace, request))
    return queues


async def kill_in_the_middle(cluster: LocalCluster, replay: Replay, at: int, killed: str) -> float:
    """SIGKILL a shard when half is done; returns after how many seconds it served again."""
    while replay.done < at:
        await asyncio.sleep(READY_POLL_S)
    pid = await asyncio.to_thread(cluster.shard_pid, killed)
    if pid is None:
        raise RuntimeError(f"{killed} does not run")
    say(f"SIGKILL for {killed}, after {replay.done:,} requests and {len(replay.acknowledged):,} acknowledged inserts.")
    replay.killed_at = time()
    os.kill(pid, signal.SIGKILL)
    began = perf_counter()
    replay.enter(f"{killed} down")
    port = cluster.ports.shards[int(killed.rpartition("-")[2])][0]
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.ok:
                        break
            await asyncio.sleep(READY_POLL_S)
    replay.enter("after")
    return perf_counter() - began


async def look_up(client: AsyncClient, replay: Replay) -> int:
    """How many of the acknowledged inserts are not found in full."""
    missing = 0
    for namespace, worker, sequence in replay.acknowledged:
        answer = await client.match(namespace, block_ids=sequence, workers=[worker], deadline_ms=5_000)
        missing += answer.matched_blocks < len(sequence) // 8
    return missing


async def tell_story(client: AsyncClient, killed_at: float) -> None:
    """What the coordinator saw of it."""
    for event in await client.events():
        if event.node == KILLED and event.time >= killed_at:
            say(f"    +{event.time - killed_at:5.2f} s  {event.kind:<16} {event.text}")


def say(text: str) -> None:
    """To the screen, now."""
    print(text, flush=True)


def main() -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of all traces together (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sarp-cluster-demo-") as directory:
        return asyncio.run(demonstrate(Path(directory), arguments.requests, KILLED))


if __name__ == "__main__":
    sys.exit(main())
