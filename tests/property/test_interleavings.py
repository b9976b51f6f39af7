"""Operations that wait for the disk while others change the index: nothing is lost, doubled, or seen half done.

A match is compared with two oracles: one learns of an insert when it is acknowledged, the other when it is issued. What
the first knew when the match began must be found, what the second does not know when it ends must not.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster.config import IndexConfig
from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, WorkerCounts, chained_block_ids
from sarp_cluster.types import Tier, Worker
from shard.index import Index
from tests.property import scenarios
from tests.property.scenarios import NAMESPACES, WORKERS, Tokens
from tests.property.scheduling import Delay, ScheduledLoop, reads_wait

T = TypeVar("T")

BASE_WORKER: Final = Worker("base")
WAITS_MAX: Final = 200
"""Waits of one operation."""
TURNS_MAX: Final = 2_000
"""Turns of the loop that an operation gets to finish while another is held; it may have to wait for that one."""

# Shrinking a failure takes longer than finding it, and so does a thorough search.
pytestmark = pytest.mark.timeout(1_800)


class Operation(NamedTuple):
    """One thing a worker does to, or asks about, a sequence."""

    kind: str
    tokens: Tokens = ()
    first: int = 0
    tier: Tier = Tier.GPU
    namespace: int = 0


class Arena:
    """An index with many operations in flight, and two oracles: what is acknowledged, what may have happened."""

    def __init__(self, index: Index, removers: frozenset[Worker] = frozenset()) -> None:
        self.index = index
        self.removers = removers
        """Workers that remove something: what is found of them in the meantime is not compared."""
        self.acknowledged, self.issued = ReferenceIndex(), ReferenceIndex()
        self._namespaces = [
            (index.create_namespace(spec), self.acknowledged.create_namespace(spec), self.issued.create_namespace(spec))
            for spec in NAMESPACES
        ]
        self._seqs = dict.fromkeys((BASE_WORKER, *WORKERS), 0)
        self._known: set[Tokens] = set()

    async def perform(self, worker: Worker, operation: Operation, *, again: bool = False) -> None:
        """One operation, from issuing it to its acknowledgement. `again`: under the number of the worker's last one."""
        if operation.kind in ("insert", "remove") and not again:
            self._seqs[worker] += 1
        match operation.kind:
            case "insert":
                await self._insert(worker, operation)
            case "remove":
                await self._remove(worker, operation)
            case "match":
                await self._match(operation)
            case "step":
                await self.index.backfill_step()
            case "drain":
                await self.index.drain_backfill()
            case unknown:
                raise ValueError(unknown)

    async def check(self) -> None:
        """When nothing is in flight: the index is what any order of the operations would have made of it."""
        await self.index.validate()
        assert self.index.statistics().blocks == self.acknowledged.block_count() == self.issued.block_count()
        for namespace, acknowledged, _ in self._namespaces:
            for tokens in sorted(self._known):
                block_ids = chained_block_ids(tokens)
                answer = Answer.of(await self.index.match(namespace, block_ids, detail="blocks"))
                assert answer == self.acknowledged.match(acknowledged, block_ids, detail="blocks")

    async def _insert(self, worker: Worker, operation: Operation) -> None:
        namespace, acknowledged, issued = self._namespaces[operation.namespace]
        block_ids, arguments = self._arguments(worker, operation)
        self.issued.insert(issued, block_ids, **arguments)
        await self.index.insert(namespace, block_ids, **arguments)
        self.acknowledged.insert(acknowledged, block_ids, **arguments)

    async def _remove(self, worker: Worker, operation: Operation) -> None:
        namespace, acknowledged, issued = self._namespaces[operation.namespace]
        block_ids, arguments = self._arguments(worker, operation)
        arguments["last"] = len(operation.tokens)
        self.acknowledged.remove(acknowledged, block_ids, **arguments)
        await self.index.remove(namespace, block_ids, **arguments)
        self.issued.remove(issued, block_ids, **arguments)

    async def _match(self, operation: Operation) -> None:
        namespace, acknowledged, issued = self._namespaces[operation.namespace]
        block_ids = chained_block_ids(operation.tokens)
        least = self.acknowledged.match(acknowledged, block_ids)
        answer = Answer.of(await self.index.match(namespace, block_ids))
        most = self.issued.match(issued, block_ids)
        assert least.verified_blocks <= answer.verified_blocks <= most.verified_blocks
        if not self.removers:
            assert least.matched_blocks <= answer.matched_blocks <= most.matched_blocks
        for worker in {BASE_WORKER, *WORKERS} - self.removers:
            for low, found, high in zip(_held(worker, least), _held(worker, answer), _held(worker, most), strict=True):
                assert low <= found <= high

    def _arguments(self, worker: Worker, operation: Operation) -> tuple[bytes, dict[str, Any]]:
        self._known.add(operation.tokens)
        block_ids = chained_block_ids(operation.tokens)
        first = operation.first % len(operation.tokens)
        return block_ids, {"worker": worker, "tier": operation.tier, "first": first, "seq": self._seqs[worker]}


def _held(worker: Worker, answer: Answer) -> tuple[int, ...]:
    for counts in answer.workers:
        if counts[:2] == worker:
            return counts[2:]
    return WorkerCounts(*worker, 0, 0, 0, 0)[2:]


def _removers(programs: dict[Worker, list[Operation]]) -> frozenset[Worker]:
    return frozenset(worker for worker, program in programs.items() if any(o.kind == "remove" for o in program))


def _run(config: IndexConfig, loop: ScheduledLoop, scenario: Callable[[Index], Coroutine[Any, Any, T]]) -> T:
    """`scenario` with a new index on `loop`, which is closed afterwards."""

    async def with_index() -> T:
        index = await Index.open(Path(directory), config, secret=scenarios.SECRET)
        try:
            return await scenario(index)
        finally:
            await index.close()

    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(with_index())


# Whatever hypothesis thinks of.


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Tokens], dict[Worker, list[Operation]]]:
    """Sequences that are there at the beginning, and what each worker does then; most share some of the first."""
    base = draw(scenarios.runs(min_size=1))
    branches = st.builds(
        lambda cut, suffix: base[: len(base) - cut % len(base)] + suffix, st.integers(0, 100), scenarios.runs()
    )
    operation = st.builds(
        Operation,
        kind=st.sampled_from(("insert", "insert", "insert", "match", "match", "remove")),
        tokens=branches,
        first=st.sampled_from((0, 0, 0, 5)),
        tier=st.sampled_from((Tier.GPU, Tier.SSD)),
        namespace=st.sampled_from((0, 0, 0, 1)),
    )
    present = [base, *draw(st.lists(branches, max_size=5))]
    return present, {worker: draw(st.lists(operation, min_size=1, max_size=6)) for worker in WORKERS}


delays = st.builds(Delay, turns=st.integers(0, 12), late=st.booleans())


@given(
    config=scenarios.tiny_configs(),
    history=histories(),
    steps=st.integers(0, 8),
    schedule=st.lists(delays, max_size=60),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from((1.0, 0.7)),
)
def test_concurrent_operations_end_as_any_order_would(
    config: IndexConfig,
    history: tuple[list[Tokens], dict[Worker, list[Operation]]],
    steps: int,
    schedule: list[Delay],
    seed: int,
    share: float,
) -> None:
    """Workers that each do one thing after the other, all at once, and background steps between."""
    present, programs = history
    programs[BASE_WORKER] = [Operation("step")] * steps
    loop = ScheduledLoop()

    async def scenario(index: Index) -> None:
        arena = Arena(index, _removers(programs))

        async def perform(worker: Worker, program: list[Operation]) -> None:
            for operation in program:
                await arena.perform(worker, operation)

        for tokens in present:
            await arena.perform(BASE_WORKER, Operation("insert", tokens))
        loop.schedule = iter(schedule)
        with reads_wait(index, seed=seed, share=share):
            async with asyncio.timeout(50), asyncio.TaskGroup() as group:
                for worker, program in programs.items():
                    group.create_task(perform(worker, program))
            await arena.check()
            await index.drain_backfill()
        await arena.check()

    _run(config, loop, scenario)


# One operation held at each of its waits in turn, while another runs from beginning to end.

# Every list is long, every list is refined, nothing is pruned for long, every delta is folded, every merge is due.
EAGER: Final = IndexConfig(
    segment_blocks=4,
    base_points=2,
    refinement_threshold=2,
    pruning_threshold=1,
    retrieval_max=None,
    snapshot_log_bytes=1_024,
    delta_segments_max=0,
    log_file_bytes=4_096,
)
STEM: Final = (0,) * 9  # two full segments and one block of a third
PRELOADED: Final = (STEM, (*STEM[:6], 1), (*STEM[:6], 2, 2, 2), (1, 1, 1))
OPERATIONS: Final = {
    "extension": Operation("insert", (*STEM, 0, 0, 0, 0, 0)),
    "longer extension": Operation("insert", (*STEM, 0, 0, 1, 1, 1, 1, 1, 1)),
    "divergence": Operation("insert", (*STEM[:6], 3, 3, 3)),
    "deeper divergence": Operation("insert", (*STEM[:7], 3, 3, 3)),
    "extension of a divergence": Operation("insert", (*STEM[:6], 1, 1, 1, 1, 1)),
    "something new": Operation("insert", (4, 4, 4, 4, 4, 4)),
    "the same again": Operation("insert", STEM, first=5),
    "another tenant's": Operation("insert", STEM, namespace=1),
    "removal": Operation("remove", STEM, first=2),
    "match": Operation("match", (*STEM, 0, 0, 0, 0, 0)),
    "match of a divergence": Operation("match", (*STEM[:6], 3, 3, 3)),
    "background step": Operation("step"),
    "background work": Operation("drain"),
}


async def _load(arena: Arena) -> None:
    for tokens in PRELOADED:
        await arena.perform(BASE_WORKER, Operation("insert", tokens))
    for worker in WORKERS[:2]:
        await arena.perform(worker, Operation("insert", STEM))


async def _until_held(task: asyncio.Task[None], schedule: Iterator[Delay]) -> bool:
    """Wait until the schedule holds a job of `task`. False if it is done without."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ScheduledLoop)
    loop.schedule = schedule
    while not (task.done() or loop.held):  # no time passes: these are the turns of the loop
        await asyncio.sleep(0)
    loop.schedule = iter(())
    await asyncio.sleep(0)  # a job that the schedule was just asked about is held a turn later
    return bool(loop.held)


@pytest.mark.parametrize("late", [False, True], ids=["old result", "late result"])
@pytest.mark.parametrize("other", OPERATIONS)
@pytest.mark.parametrize("held", OPERATIONS)
def test_an_operation_may_wait_anywhere_while_another_runs(held: str, other: str, late: bool) -> None:
    """Each wait of one operation in turn lasts until the other is done."""
    removers = _removers({WORKERS[0]: [OPERATIONS[held]], WORKERS[1]: [OPERATIONS[other]]})

    async def scenario(loop: ScheduledLoop, schedule: Iterator[Delay], index: Index) -> bool:
        arena = Arena(index, removers)
        await _load(arena)
        with reads_wait(index):
            async with asyncio.timeout(50), asyncio.TaskGroup() as group:
                first = group.create_task(arena.perform(WORKERS[0], OPERATIONS[held]))
                waited = await _until_held(first, schedule)
                second = group.create_task(arena.perform(WORKERS[1], OPERATIONS[other]))
                for _ in range(TURNS_MAX):
                    if second.done():
                        break
                    await asyncio.sleep(0)
                loop.release()
            await arena.check()
            await index.drain_backfill()
        await arena.check()
        return waited

    _at_each_wait(late, scenario)


@pytest.mark.parametrize("late", [False, True], ids=["old result", "late result"])
@pytest.mark.parametrize("cancelled", OPERATIONS)
def test_an_operation_may_be_cancelled_anywhere_and_tried_again(cancelled: str, late: bool) -> None:
    """Its caller went away during one of its waits: it happened or it did not, and the same again makes it so."""
    removers = _removers({WORKERS[0]: [OPERATIONS[cancelled]]})

    async def scenario(loop: ScheduledLoop, schedule: Iterator[Delay], index: Index) -> bool:
        # Without its own background task, which would take the steps that are to be cancelled here.
        for runner in index._runners:
            runner.cancel()
        arena = Arena(index, removers)
        await _load(arena)
        with reads_wait(index):
            async with asyncio.timeout(50):
                task = asyncio.create_task(arena.perform(WORKERS[0], OPERATIONS[cancelled]))
                waited = await _until_held(task, schedule)
                task.cancel()
                loop.release()
                await asyncio.wait([task])
                assert task.cancelled() or task.exception() is None
                await index.validate()
                await arena.perform(WORKERS[0], OPERATIONS[cancelled], again=True)
            await arena.check()
            await index.drain_backfill()
        await arena.check()
        return waited

    _at_each_wait(late, scenario)


def _at_each_wait(
    late: bool, scenario: Callable[[ScheduledLoop, Iterator[Delay], Index], Coroutine[Any, Any, bool]]
) -> None:
    """Once for the first wait, once for the second, until `scenario` says that there was no such wait."""
    for number in range(WAITS_MAX):
        loop = ScheduledLoop()
        schedule = chain(repeat(Delay(), number), [Delay(turns=None, late=late)])
        if not _run(EAGER, loop, partial(scenario, loop, schedule)):
            return
    pytest.fail(f"no end of waits after {WAITS_MAX}")
