"""From SIGKILL of a shard to its first complete answer again, under its supervisor: how long, and in which phase.

    python -m bench.failover                          a shard of 1e6 blocks, killed ten times
    python -m bench.failover --blocks 1e5 --rounds 3

A cluster of real processes on this machine, the load on one of its shards: conversations of 256 blocks under 40
prompts. The shard is killed dirty, while a worker inserts; while it is away a worker is registered, which it has to
learn; it is asked through the router each few milliseconds until the answer is complete and whole. The phases:

    detect   the coordinator has seen that the process ended (its timeline)
    start    the next process listens: spawned, Python started, everything imported (its log)
    open     the store is open, with all that was acknowledged (its log; beside it what the recovery itself took)
    serve    it has asked the coordinator what it missed, the router has found it, and the first answer is complete
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from sarp_cluster.cluster.placement import slot_of
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.cluster.view import split_address
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.errors import SarpError
from sarp_cluster.types import HashProfile
from sarp_cluster.up import LocalCluster, Ports, running
from sarp_cluster.wire import messages
from sarp_cluster.wire.control import PROTOCOL_VERSION, Hello
from sarp_cluster.wire.stream_client import Peer

SHARD: Final = "shard-0"
PROMPTS: Final = 40
PROMPT_BLOCKS: Final = 64
CONVERSATION_BLOCKS: Final = 256
WRITERS: Final = 16
PROBE_S: Final = 0.003
LOAD_S: Final = 0.01
BETWEEN_S: Final = 11.0
"""From one round to the next: a process that ends sooner is not taken for stable, and started after a pause."""
SEED: Final = 1
GOAL_S: Final = 3.0
GOAL_OPEN_S: Final = 0.1


class Round(NamedTuple):
    """Seconds of each phase, one after the other."""

    detect: float
    start: float
    open: float
    serve: float
    recovery: float
    """Of `open`, what the index itself took."""

    @property
    def total(self) -> float:
        """From the kill to the first complete answer."""
        return self.detect + self.start + self.open + self.serve


class Load:
    """Sequences of one shard, and a line to the router."""

    def __init__(self, peer: Peer, namespace: messages.NamespaceReply, shards: list[str]) -> None:
        self._peer = peer
        self._namespace = namespace.namespace
        self._rng = random.Random(SEED)
        self._seqs: dict[str, int] = {}
        if namespace.key is None:
            raise SystemExit("the router gives no namespace key")
        key, slots = NamespaceKey(namespace.key), SlotMap.first(shards, bytes(NONCE_BYTES))
        self._prompts: list[bytes] = []
        while len(self._prompts) < PROMPTS:
            prompt = self._rng.randbytes(8 * PROMPT_BLOCKS)
            if slots.owner(slot_of(key.internal_id(prompt, 0))) == SHARD:
                self._prompts.append(prompt)

    def conversation(self) -> bytes:
        """Block IDs of a new one."""
        own = self._rng.randbytes(8 * (CONVERSATION_BLOCKS - PROMPT_BLOCKS))
        return self._rng.choice(self._prompts) + own

    async def insert(self, worker: str, block_ids: bytes) -> None:
        """Insert, again and again until it is acknowledged."""
        self._seqs[worker] = self._seqs.get(worker, 0) + 1
        request = messages.InsertRequest(
            namespace=self._namespace, block_ids=block_ids, worker=worker, seq=self._seqs[worker]
        )
        while True:
            try:
                await self._peer.call("insert", request, messages.InsertReply, 3.0)
                return
            except (SarpError, TimeoutError):
                await asyncio.sleep(LOAD_S)

    async def register(self, worker: str) -> None:
        """A change without a key: all shards have to know it."""
        request = messages.RegisterRequest(worker=worker)
        await self._peer.call("register_worker", request, messages.WorkerReply, 10.0)

    async def found(self, block_ids: bytes) -> bool:
        """Is the answer complete, and all of it there?"""
        request = messages.MatchRequest(namespace=self._namespace, block_ids=block_ids)
        try:
            reply = await self._peer.call("match", request, messages.MatchReply, 1.0)
        except TimeoutError:
            return False
        return reply.complete and reply.matched_blocks * 8 == len(block_ids)

    async def fill(self, blocks: float, workers: list[str]) -> bytes:
        """Insert so many blocks; returns one of the sequences."""
        own = CONVERSATION_BLOCKS - PROMPT_BLOCKS
        count = max(1, round(blocks / own))
        sequence = b""
        with tqdm(total=count * own, unit="block", unit_scale=True, mininterval=0.5, disable=None) as bar:

            async def write(worker: str, share: int) -> None:
                nonlocal sequence
                for _ in range(share):
                    sequence = self.conversation()
                    await self.insert(worker, sequence)
                    bar.update(own)

            shares = [count // len(workers) + (number < count % len(workers)) for number in range(len(workers))]
            await asyncio.gather(*map(write, workers, shares))
        return sequence


def log_lines(log: Path, after: float) -> Iterator[tuple[float, str]]:
    """(seconds since 1970, text) of a node's log lines after a time."""
    for line in log.read_text().splitlines():
        try:
            when = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        except ValueError:
            continue  # a traceback's
        if when >= after:
            yield when, line[24:]


async def fail_over(cluster: LocalCluster, load: Load, coordinator: Peer, known: bytes, worker: str) -> Round:
    """Kill the shard once, and find out when what happened."""
    stop = asyncio.Event()

    async def keep_inserting() -> None:
        while not stop.is_set():
            await load.insert(worker, load.conversation())
            await asyncio.sleep(LOAD_S)

    inserting = asyncio.create_task(keep_inserting())
    await asyncio.sleep(1.0)
    pid = await asyncio.to_thread(cluster.shard_pid, SHARD)
    if pid is None:
        raise SystemExit(f"{SHARD} is not there")
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    missing = asyncio.create_task(load.register(f"meanwhile-{pid}"))
    while await load.found(known):
        await asyncio.sleep(0)  # what was on its way
    while not await load.found(known):
        await asyncio.sleep(PROBE_S)
    served = time.time()
    stop.set()
    await asyncio.gather(inserting, missing)
    told = await coordinator.call("events", messages.EventsRequest(limit=4_096), messages.EventList, 2.0)
    seen = min(one.time for one in told.events if one.node == SHARD and one.time >= killed and one.kind == "shard_down")
    log = cluster.directory / "coordinator" / "shards" / f"{SHARD}.log"
    lines = [*await asyncio.to_thread(lambda: list(log_lines(log, killed - 0.001)))]
    listens = next(when for when, text in lines if "HTTP on" in text)
    opened, text = next((when, text) for when, text in lines if "opened in" in text)
    recovery = float(text.partition("opened in")[2].split()[0])
    return Round(seen - killed, listens - seen, opened - listens, served - opened, recovery)


def table(rounds: list[Round]) -> str:
    """Median and worst of each phase."""
    rows = ["| | detect | start | open (of which recovery) | serve | total |", "|---|---|---|---|---|---|"]
    for name, of in (("median", median), ("longest", max)):
        recovery = of([one.recovery for one in rounds])
        cells = [f"{of([getattr(one, phase) for one in rounds]):.3f}" for phase in ("detect", "start", "open", "serve")]
        cells[2] += f" ({recovery:.3f})"
        rows.append(f"| {name} | {' | '.join(cells)} | {of([one.total for one in rounds]):.3f} |")
    return "\n".join(rows)


async def measure(directory: Path, blocks: float, shards: int, rounds: int) -> list[Round]:
    """Fill a cluster's shard and kill it some times."""
    cluster = LocalCluster(directory=directory, ports=Ports.free(shards, 1))
    found: list[Round] = []
    async with running(cluster):
        hello = Hello(version=PROTOCOL_VERSION)
        places = [cluster.router_streams[0], f"sarp://127.0.0.1:{cluster.ports.coordinator[1]}"]
        router, coordinator = (
            Peer(lambda place=place: split_address(place.removeprefix("sarp://")), lambda: hello)  # type: ignore[misc]
            for place in places
        )
        keeping = [asyncio.create_task(peer.run()) for peer in (router, coordinator)]
        try:
            await asyncio.gather(router.wait_connected(), coordinator.wait_connected())
            made = messages.NamespaceRequest(model="failover", hash_profile=HashProfile.OPAQUE)
            namespace = await router.call("create_namespace", made, messages.NamespaceReply, 10.0)
            load = Load(router, namespace, [f"shard-{number}" for number in range(shards)])
            workers = [f"worker-{number}" for number in range(WRITERS)]
            for worker in workers:
                await load.register(worker)
            began = time.monotonic()
            known = await load.fill(blocks, workers)
            print(f"inserted, durably, in {time.monotonic() - began:.1f} s")
            for number in range(rounds):
                await asyncio.sleep(BETWEEN_S)
                found.append(await fail_over(cluster, load, coordinator, known, workers[0]))
                phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found[-1]._asdict().items())
                print(f"round {number + 1}: {found[-1].total:.3f} s: {phases}", flush=True)
            described = await coordinator.call("cluster", messages.Empty(), messages.ClusterReply, 2.0)
            for one in described.shards:
                if one.shard == SHARD:
                    print(f"{SHARD}: {one.blocks:,} blocks in {one.segments:,} segments, {one.disk_bytes:,} bytes")
        finally:
            for task in keeping:
                task.cancel()
    return found


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=float, default=1e6, help="that the shard holds (default: %(default)g)")
    parser.add_argument("--shards", type=int, default=3, help="of the cluster (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="kills (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="on the disk that is measured (default: a temporary directory)")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.dir) as directory:
        rounds = asyncio.run(measure(Path(directory), options.blocks, options.shards, options.rounds))
    print(table(rounds))
    worst = max(one.total for one in rounds)
    print(f"goals: under {GOAL_S:g} s in all ({'met' if worst < GOAL_S else 'missed'}), recovery under", end=" ")
    print(f"{GOAL_OPEN_S:g} s ({'met' if max(one.recovery for one in rounds) < GOAL_OPEN_S else 'missed'})")


if __name__ == "__main__":
    main()
