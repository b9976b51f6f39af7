"""Match and insert when everything is in memory: an index beside its baselines, in one interleaved run.

    python -m bench.hot_match                     both workloads, all contestants, a table
    python -m bench.hot_match --workload agent --json result.json
    python -m bench.hot_match --trace FILE        requests of a real trace instead

One client, block IDs given. A request is one match of a conversation's context, then one insert of what the serving
worker newly holds. Contestants take turns in short chunks of the same requests, each time in another order, so that a
busy moment of the machine hits all of them alike; their answers are compared, and a difference ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from bench.baselines import Contestant, Match
from bench.baselines.flat_map import FlatMapIndex
from bench.baselines.python_dict import DictIndex
from sarp_cluster.core.block_id import xxh3_block_ids
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import HashProfile, InsertResult, MatchResult, Namespace, NamespaceSpec, PrefixIndex, Worker
from shard.index import Index

CHUNK_REQUESTS = 100
WORKERS = 16


class Request(NamedTuple):
    """One turn of a conversation."""

    ids: bytes
    """The context."""
    sequence: bytes
    """What is inserted after the match: the context and, in traces, the answer."""
    worker: int
    """Who serves it, and holds all of it afterwards."""
    first: int
    """Blocks that this worker held before."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the conversations of a synthetic workload are like. Lengths in blocks, ranges inclusive."""

    system_prompts: int
    system_prompt_blocks: tuple[int, int]
    conversations: int
    context_blocks: tuple[int, int]
    """The shortest first context and the longest last one."""
    turn_blocks: tuple[int, int]
    open_conversations: int = 64
    """Conversations whose turns alternate."""
    moves: float = 0.1
    """Share of turns served by another worker than the turn before."""
    seed: int = 1


CHAT = Shape(
    system_prompts=20,
    system_prompt_blocks=(32, 64),
    conversations=5_000,
    context_blocks=(76, 292),
    turn_blocks=(8, 40),
)
AGENT = Shape(
    system_prompts=8,
    system_prompt_blocks=(120, 200),
    conversations=250,
    context_blocks=(236, 1_796),
    turn_blocks=(20, 120),
)


@dataclass
class _Conversation:
    ids: bytes
    """All that it will ever contain."""
    prompt: int
    prompt_blocks: int
    blocks: int
    worker: int
    held: dict[int, int] = field(default_factory=dict)


def synthetic(shape: Shape) -> Iterator[Request]:
    """The requests of `shape`, the same each time."""
    rng = random.Random(shape.seed)
    shortest, longest = shape.context_blocks
    prompts = [rng.randbytes(8 * rng.randint(*shape.system_prompt_blocks)) for _ in range(shape.system_prompts)]
    popularity = [1 / (rank + 1) for rank in range(shape.system_prompts)]
    prompt_holders: set[tuple[int, int]] = set()

    def opened() -> _Conversation:
        prompt = rng.choices(range(shape.system_prompts), popularity)[0]
        own = rng.randbytes(8 * rng.randint(shortest, longest))
        ids = (prompts[prompt] + own)[: max(len(own), 8 * shortest)]
        first_turn = min(shortest + rng.randint(0, shape.turn_blocks[1]), len(ids) // 8)
        return _Conversation(ids, prompt, len(prompts[prompt]) // 8, first_turn, rng.randrange(WORKERS))

    waiting = shape.conversations
    talking: list[_Conversation] = []
    while waiting or talking:
        while waiting and len(talking) < shape.open_conversations:
            talking.append(opened())
            waiting -= 1
        at = rng.randrange(len(talking))
        one = talking[at]
        if rng.random() < shape.moves:
            one.worker = rng.randrange(WORKERS)
        holder = (one.prompt, one.worker)
        first = one.held.get(one.worker, one.prompt_blocks if holder in prompt_holders else 0)
        prompt_holders.add(holder)
        one.held[one.worker] = one.blocks
        ids = one.ids[: 8 * one.blocks]
        yield Request(ids, ids, one.worker, first)
        if 8 * one.blocks == len(one.ids):
            talking[at] = talking[-1]
            talking.pop()
        else:
            one.blocks = min(one.blocks + rng.randint(*shape.turn_blocks), len(one.ids) // 8)


def traced(path: Path) -> Iterator[Request]:
    """The requests of a real trace in replay order, sessions dealt to the workers by number."""
    trace = open_trace(path)

    def block_ids(tokens: bytes) -> bytes:
        return xxh3_block_ids(tokens, trace.block_tokens)

    for request in trace.requests(block_ids):
        if request.context and request.first < request.sequence_blocks:
            yield Request(request.context, request.sequence, request.session % WORKERS, request.first)


WORKLOADS: dict[str, Callable[[], Iterator[Request]]] = {
    "chat": lambda: synthetic(CHAT),
    "agent": lambda: synthetic(AGENT),
}


class IndexContestant:
    """A `PrefixIndex`, such as `shard.index.Index`: the same calls, awaited."""

    def __init__(self, name: str, index: PrefixIndex, namespace: Namespace) -> None:
        self.name = name
        self._index = index
        self._namespace = namespace
        # Padded, so that workers sort by name as they do by number.
        self._workers = [Worker(f"{number:04}") for number in range(WORKERS)]

    def match(self, ids: bytes) -> Coroutine[object, object, MatchResult]:
        return self._index.match(self._namespace, ids)

    def insert(self, ids: bytes, worker: int, first: int) -> Coroutine[object, object, InsertResult]:
        return self._index.insert(self._namespace, ids, worker=self._workers[worker], first=first, durable=False)


AnyContestant = Contestant | IndexContestant
OURS = "sarp"
BASELINES: dict[str, Callable[[], Contestant]] = {
    "flat-map": FlatMapIndex,
    "dict": DictIndex,
}
CONTESTANTS = [*BASELINES, OURS]


@asynccontextmanager
async def opened(name: str) -> AsyncIterator[AnyContestant]:
    """A fresh contestant; ours over a real store in a temporary directory."""
    if name != OURS:
        yield BASELINES[name]()
        return
    with TemporaryDirectory() as directory:
        index = await Index.open(Path(directory) / "store", secret=bytes(32))
        namespace = index.create_namespace(NamespaceSpec(model="bench", hash_profile=HashProfile.OPAQUE))
        try:
            yield IndexContestant(name, index, namespace)
        finally:
            await index.close()


def _as_match(result: Match | MatchResult) -> Match:
    if isinstance(result, Match):
        return result
    return Match(result.matched_blocks, [(int(one.instance_id), one.gpu) for one in result.workers if one.gpu])


@dataclass
class Times:
    """Nanoseconds of each call."""

    match: list[int] = field(default_factory=list)
    insert: list[int] = field(default_factory=list)


async def _turn(contestant: AnyContestant, requests: Sequence[Request], times: Times) -> list[Match]:
    """Run a chunk of requests. What the answers are turned into afterwards is not timed."""
    results: list[Match | MatchResult] = []
    for ids, sequence, worker, first in requests:
        begin = perf_counter_ns()
        if isinstance(contestant, IndexContestant):
            result: Match | MatchResult = await contestant.match(ids)
            middle = perf_counter_ns()
            await contestant.insert(sequence, worker, first)
        else:
            result = contestant.match(ids)
            middle = perf_counter_ns()
            contestant.insert(sequence, worker, first)
        end = perf_counter_ns()
        await asyncio.sleep(0)  # as between two requests of a server: background work gets its turn, unmeasured
        times.match.append(middle - begin)
        times.insert.append(end - middle)
        results.append(result)
        # Untimed: an index that never has to wait would neither write its log out nor do its background work.
        await asyncio.sleep(0)
    return [_as_match(result) for result in results]


async def measure(contestants: Sequence[AnyContestant], requests: Iterator[Request]) -> list[Times]:
    """Times of each contestant, which all answer the same requests in the same state."""
    times = [Times() for _ in contestants]
    gc.collect()
    gc.disable()  # one contestant's garbage must not be collected on another's time
    try:
        for chunk_number in count():
            chunk = list(islice(requests, CHUNK_REQUESTS))
            if not chunk:
                return times
            answers: dict[int, list[Match]] = {}
            for turn in range(len(contestants)):
                at = (chunk_number + turn) % len(contestants)
                answers[at] = await _turn(contestants[at], chunk, times[at])
            for at, contestant in enumerate(contestants):
                for number, (answer, expected) in enumerate(zip(answers[at], answers[0], strict=True)):
                    # A capped match may be shorter than the exact one, never anything else.
                    if answer != expected and not answer.matched < expected.matched:
                        raise SystemExit(
                            f"request {chunk_number * CHUNK_REQUESTS + number}: {contestant.name} answers {answer}, "
                            f"{contestants[0].name} {expected}"
                        )
    finally:
        gc.enable()
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Row:
    """Microseconds of one operation."""

    workload: str
    contestant: str
    operation: str
    calls: int
    mean_us: float
    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, workload: str, contestant: str, operation: str, nanoseconds: list[int]) -> Row:
        us = np.array(nanoseconds) / 1e3
        p50, p99 = np.percentile(us, [50, 99])
        return cls(workload, contestant, operation, len(us), float(us.mean()), float(p50), float(p99))


async def compete(requests: Iterator[Request], names: Sequence[str]) -> list[Times]:
    """Open the named contestants and measure them."""
    async with AsyncExitStack() as stack:
        contestants = [await stack.enter_async_context(opened(name)) for name in names]
        return await measure(contestants, requests)


def run(workload: str, requests: Iterator[Request], names: Sequence[str], requests_max: int | None = None) -> list[Row]:
    """Measure the named contestants on one workload."""
    times = asyncio.run(compete(islice(requests, requests_max), names))
    return [
        Row.of(workload, name, operation, getattr(one, operation))
        for name, one in zip(names, times, strict=True)
        for operation in ("match", "insert")
    ]


def main() -> None:
    """Print a table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--trace", type=Path, action="append", help="replay a trace instead of the workloads")
    parser.add_argument("--contestant", choices=CONTESTANTS, action="append", help="default: all")
    parser.add_argument("--requests", type=int, help="stop after so many requests a workload")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()

    rows: list[Row] = []
    print(f"{'workload':10}{'contestant':20}{'':8}{'calls':>8}{'mean µs':>10}{'p50':>9}{'p99':>9}")
    sources: dict[str, Callable[[], Iterator[Request]]]
    if options.trace:
        sources = {path.name.split(".")[0]: partial(traced, path) for path in options.trace}
    else:
        sources = {name: WORKLOADS[name] for name in options.workload or WORKLOADS}
    for workload, requests in sources.items():
        for row in run(workload, requests(), options.contestant or CONTESTANTS, options.requests):
            rows.append(row)
            print(
                f"{row.workload:10}{row.contestant:20}{row.operation:8}{row.calls:8}"
                f"{row.mean_us:10.1f}{row.p50_us:9.1f}{row.p99_us:9.1f}"
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
