"""What a request costs in the processes that serve it, and how long callers wait.

    python -m bench.service                        8, 150 and 900 blocks, by HTTP and by stream
    python -m bench.service --dynamo PYTHON        Dynamo's standalone indexer beside it, from the environment of PYTHON
                                                   (with ai-dynamo-runtime, pyzmq and msgpack)

A shard and a router, each a process of its own, hold the same sequences; this process asks. CPU is that of the serving
process (schedstat, all its threads), per request. "no-op" is the same HTTP server with a handler that returns a reply
it has ready. Latencies are of one caller that asks one after the other; requests a second of 64 in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from subprocess import PIPE
from time import perf_counter
from typing import Final, NamedTuple

import msgspec

from bench.baselines.dynamo import DynamoIndexer
from bench.http_load import HttpConnection
from sarp_cluster.client import AsyncClient
from sarp_cluster.core.block_id import xxh3_block_ids
from sarp_cluster.core.namespace import SECRET_BYTES_MIN
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from sarp_cluster.up import LocalCluster, Ports, running
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.auth import node_token
from sarp_cluster.wire.stream_client import StreamClient
from shard.index import Index

LENGTHS: Final = (8, 150, 900)
SEQUENCES: Final = 64
"""Different queries of each length."""
IN_FLIGHT: Final = 64
BATCH: Final = 64
BLOCK_TOKENS: Final = 16

Ask = Callable[[int], Awaitable[object]]
"""Ask for the query of a number."""


class Row(NamedTuple):
    """One line of the table."""

    what: str
    blocks: int
    cpu_us: dict[str, float]
    """By process."""
    p50_us: float
    p99_us: float
    a_second: float


class Processes:
    """CPU time of processes, all their threads."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def seconds(self) -> dict[str, float]:
        """So far, by process."""
        return {
            name: sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
            for name, pid in self._pids.items()
        }


async def measure(what: str, blocks: int, ask: Ask, processes: Processes, *, count: int, per: int = 1) -> Row:
    """Ask `count` times, each for `per` queries: first one after the other, then many at once."""
    for number in range(min(count, 200)):
        await ask(number)
    times = []
    for number in range(count // 4):
        began = perf_counter()
        await ask(number)
        times.append(perf_counter() - began)
    times.sort()
    before = processes.seconds()
    began = perf_counter()
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    took = perf_counter() - began
    after = processes.seconds()
    return Row(
        what,
        blocks,
        {name: (after[name] - before[name]) / count / per * 1e6 for name in after},
        times[len(times) // 2] * 1e6 / per,
        times[len(times) * 99 // 100] * 1e6 / per,
        count * per / took,
    )


async def in_process(directory: Path, queries: Sequence[bytes]) -> float:
    """Microseconds of a match in process, hot."""
    index = await Index.open(directory, secret=bytes(SECRET_BYTES_MIN))
    try:
        namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
        for query in queries:
            await index.insert(namespace, query, worker=Worker("w"), durable=False)
        for _ in range(20):
            for query in queries:
                await index.match(namespace, query)
        began = perf_counter()
        for _ in range(100):
            for query in queries:
                await index.match(namespace, query)
        return (perf_counter() - began) / 100 / len(queries) * 1e6
    finally:
        await index.close()


async def run(count: int, dynamo: str | None) -> list[Row]:
    """All measurements; prints as it goes."""
    rows: list[Row] = []
    tokens = {n: [os.urandom(4 * BLOCK_TOKENS * n) for _ in range(SEQUENCES)] for n in LENGTHS}
    queries = {n: [xxh3_block_ids(one, BLOCK_TOKENS) for one in tokens[n]] for n in LENGTHS}
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="sarp-bench-") as directory:
        for n in LENGTHS:
            hot = await in_process(Path(directory) / f"index-{n}", queries[n])
            print(f"{'match in process':<28}{n:>7}{hot:>10.1f}")
        cluster = LocalCluster(directory=Path(directory) / "cluster", ports=Ports.free(1, 1))
        async with running(cluster):
            await one_cluster(cluster, queries, count, rows)
        await no_op(queries, count, rows)
    if dynamo is not None:
        with DynamoIndexer(dynamo, tokens, BLOCK_TOKENS) as indexer:
            for n in LENGTHS:
                lanes = [await HttpConnection.open(indexer.host, indexer.port) for _ in range(IN_FLIGHT)]
                for path, bodies in indexer.queries(n):
                    processes = Processes({"indexer": indexer.pid})
                    ask = by_http(lanes, path, bodies, "application/json")
                    told(await measure(f"Dynamo {path}", n, ask, processes, count=count), rows)
    return rows


async def one_cluster(cluster: LocalCluster, queries: dict[int, list[bytes]], count: int, rows: list[Row]) -> None:
    """A shard and a router, by every way there is."""
    shard_pid, router_pid = await asyncio.to_thread(cluster.shard_pid, "shard-0"), cluster.pid("router-0")
    if shard_pid is None or router_pid is None:
        raise RuntimeError("the cluster does not run")
    async with AsyncClient(cluster.router_urls[0]) as client:
        namespace = await client.namespace("m")
        await client.register_worker("w")
        for n in LENGTHS:
            for query in queries[n]:
                await client.insert(namespace, worker="w", block_ids=query)
    shard, router = Processes({"shard": shard_pid}), Processes({"router": router_pid, "shard": shard_pid})
    secret = await asyncio.to_thread(cluster.secret_file.read_bytes)
    hello = control.Hello(version=1, credential=node_token(secret))
    to_shard = await StreamClient.connect("127.0.0.1", cluster.ports.shards[0][1], hello)
    to_router = await StreamClient.connect("127.0.0.1", cluster.ports.routers[0][1], control.Hello(version=1))
    for n in LENGTHS:
        requests = [
            messages.MatchRequest(namespace=namespace.id, block_ids=query, deadline_ms=5_000) for query in queries[n]
        ]
        bodies = [msgspec.msgpack.encode(request) for request in requests]
        for what, port, processes in (
            ("HTTP, at the shard", cluster.ports.shards[0][0], shard),
            ("HTTP, through the router", cluster.ports.routers[0][0], router),
        ):
            lanes = [await HttpConnection.open("127.0.0.1", port) for _ in range(IN_FLIGHT)]
            ask = by_http(lanes, "/v1/match", bodies, "application/msgpack")
            told(await measure(what, n, ask, processes, count=count), rows)
            for lane in lanes:
                lane.close()
        batch = messages.BatchRequest(items=[requests[number % SEQUENCES] for number in range(BATCH)])
        for what, stream, processes in (
            ("stream, at the shard", to_shard, shard),
            ("stream, through router", to_router, router),
        ):
            told(await measure(what, n, by_stream(stream, "match", requests), processes, count=count * 4), rows)
            ask = by_stream(stream, "batch", [batch])
            told(await measure(f"{what}, x 64", n, ask, processes, count=count // 16, per=BATCH), rows)
    to_shard.close()
    to_router.close()


def by_stream(stream: StreamClient, name: str, requests: Sequence[messages.Request]) -> Ask:
    """Asks on one stream."""
    return lambda number: stream.request(name, requests[number % len(requests)])


def by_http(lanes: Sequence[HttpConnection], path: str, bodies: Sequence[bytes], media: str) -> Ask:
    """Asks on connections that are free."""
    free = list(lanes)

    async def ask(number: int) -> bytes:
        lane = free.pop()
        try:
            return await lane.post(path, bodies[number % len(bodies)], media)
        finally:
            free.append(lane)

    return ask


async def no_op(queries: dict[int, list[bytes]], count: int, rows: list[Row]) -> None:
    """The same HTTP server with nothing behind it."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.no_op_server", stdout=PIPE)
    assert process.stdout is not None  # noqa: S101  # it is a pipe
    try:
        port = int(await process.stdout.readline())
        for n in LENGTHS:
            bodies = [
                msgspec.msgpack.encode(messages.MatchRequest(namespace="n", block_ids=query)) for query in queries[n]
            ]
            lanes = [await HttpConnection.open("127.0.0.1", port) for _ in range(IN_FLIGHT)]
            ask = by_http(lanes, "/v1/match", bodies, "application/msgpack")
            told(await measure("HTTP, no-op", n, ask, Processes({"server": process.pid}), count=count), rows)
            for lane in lanes:
                lane.close()
    finally:
        process.terminate()
        await process.wait()


HEADER: Final = f"{'':<28}{'blocks':>7}{'CPU µs':>10}{'p50 µs':>10}{'p99 µs':>10}{'/s':>10}   of it"


def told(row: Row, rows: list[Row]) -> None:
    """Keep a row and print it."""
    rows.append(row)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in row.cpu_us.items())
    cpu = sum(row.cpu_us.values())
    times = f"{row.p50_us:>10.1f}{row.p99_us:>10.1f}{row.a_second:>10,.0f}"
    print(f"{row.what:<28}{row.blocks:>7}{cpu:>10.1f}{times}   {parts}", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=8_000, help="requests of each kind by HTTP (default: %(default)s)")
    parser.add_argument("--dynamo", metavar="PYTHON", help="the Python that has ai-dynamo-runtime")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.count, arguments.dynamo))
    return 0


if __name__ == "__main__":
    sys.exit(main())
