"""Replays a trace against an index by the paper's method: match the context, compare, insert what was computed."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import MappingProxyType
from typing import Final

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, invariant
from sarp_cluster.replay.oracle import PrefixOracle
from sarp_cluster.replay.report import CandidateMeans, FoundStore, Latency, ReplayReport
from sarp_cluster.replay.request import Request, Trace
from sarp_cluster.types import IndexStatistics, MatchResult, Namespace, PrefixIndex, Tier, Worker, WorkerMark

WORKERS_DEFAULT: Final = 8
Progress = Callable[[int], object]
"""Called with 1 after each request."""
EMPTY_MARKS: Final[Mapping[Worker, WorkerMark]] = MappingProxyType({})


async def replay_trace(
    trace: Trace,
    index: PrefixIndex,
    namespace: Namespace,
    *,
    workers: int = WORKERS_DEFAULT,
    in_flight: int = 1,
    limit: int | None = None,
    progress: Progress | None = None,
    with_oracle: bool = True,
    with_candidates: bool = True,
    durable: bool = False,
    found: FoundStore | None = None,
    held: AsyncIterable[bytes] | None = None,
    marks: Mapping[Worker, WorkerMark] = EMPTY_MARKS,
) -> ReplayReport:
    """Replay the first `limit` requests (None: all) of `trace`.

    Where the index is not empty at the start, `found` says what was found, `held` gives the wire IDs of the namespace's
    blocks that a match can match (before anything is replayed they go to the oracle, which then knows what the index
    knows) and `marks` the workers' generations and numbers, from which theirs go on.

    A request matches its context and then inserts its sequence, held by worker `session % workers` on the GPU tier from
    block `first` on. A context without a full block is not matched, a sequence without a new block not inserted: an
    engine would not ask either. `in_flight` requests run at once, those of one thread of a session one after the other.

    `with_oracle` compares each answer with the exact one. With several in flight, the exact answer is the one when the
    match returns and counts inserts that have begun: an upper bound, so that loss may include what was not yet
    answered. `with_candidates` asks the index for candidate counts after each match. Both happen outside the measured
    time; with several in flight they compete with other requests for the loop: leave them out to measure speed.
    `durable` waits for each insert's sync; otherwise the index syncs in the background.

    Raises InvariantViolationError if a match is longer than the exact one, BadRequestError for an argument out of range
    or a namespace of another block size, and what the index raises.
    """
    for name, value, lowest in (("workers", workers, 1), ("in_flight", in_flight, 1), ("limit", limit, 0)):
        if value is not None and value < lowest:
            raise BadRequestError(f"{name}: {value} is below {lowest}", field=name)
    if namespace.spec.block_size != trace.block_tokens:
        raise BadRequestError(
            f"block_size: the namespace has {namespace.spec.block_size}-token blocks, trace {trace.name} "
            f"{trace.block_tokens}",
            field="block_size",
        )
    replay = _Replay(
        trace=trace,
        index=index,
        namespace=namespace,
        workers=workers,
        number_changes=in_flight == 1,
        progress=progress,
        oracle=PrefixOracle() if with_oracle else None,
        with_candidates=with_candidates,
        durable=durable,
        marks=marks,
        changes=Counter({worker: max(0, mark.seq) for worker, mark in marks.items()}),
        found=found,
    )
    if replay.oracle is not None and held is not None:
        async for block_ids in held:
            replay.oracle.add(block_ids)
    requests = trace.requests(namespace.block_ids, limit=limit)
    began = perf_counter_ns()
    if in_flight == 1:
        await replay.one_by_one(requests)
        # Nothing else waits while the replay works for itself, so that work can be left out.
        elapsed = perf_counter_ns() - began - replay.own_work_ns
    else:
        await replay.concurrently(requests, in_flight)
        elapsed = perf_counter_ns() - began
    pending = index.statistics()
    await index.drain_backfill()
    return replay.report(elapsed_ns=elapsed, pending=pending)


@dataclass(slots=True)
class _Tally:
    """Sums over the requests so far."""

    requests: int = 0
    matches: int = 0
    context: int = 0
    """Tokens in token traces, else blocks; so is `found`."""
    found: int = 0
    exact_found: int = 0
    matched_blocks: int = 0
    exact_blocks: int = 0
    reads: int = 0
    waves: int = 0
    retrieved: int = 0
    windows_routed: int = 0
    with_candidates: int = 0
    raw: int = 0
    filtered: int = 0
    match_ns: array[int] = field(default_factory=lambda: array("q"))
    insert_ns: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True, kw_only=True)
class _Replay:
    """One trace on its way through one index."""

    trace: Trace
    index: PrefixIndex
    namespace: Namespace
    workers: int
    number_changes: bool
    progress: Progress | None
    oracle: PrefixOracle | None
    with_candidates: bool
    durable: bool
    marks: Mapping[Worker, WorkerMark]
    changes: Counter[Worker]
    """Changes sent for each worker: the last seq."""
    found: FoundStore | None
    tally: _Tally = field(default_factory=_Tally)
    own_work_ns: int = 0
    """Time spent on building requests, the oracle and candidate counts, none of it awaited."""

    async def one_by_one(self, requests: Iterator[Request]) -> None:
        """Each request after the one before."""
        while (request := self._next(requests)) is not None:
            await self._run(request)
            # An index that never had to wait would keep its own background work from running: one turn of the loop.
            await asyncio.sleep(0)

    async def concurrently(self, requests: Iterator[Request], in_flight: int) -> None:
        """Up to `in_flight` requests at once. Reads ahead a bounded number to find some whose thread is not busy."""
        running = asyncio.Semaphore(in_flight)
        ahead = asyncio.Semaphore(in_flight * limits.REPLAY_READ_AHEAD)
        last: dict[tuple[int, int], asyncio.Event] = {}  # of threads with a request read ahead: bounded by `ahead`

        async def run_after(request: Request, before: asyncio.Event | None, done: asyncio.Event) -> None:
            if before is not None:
                await before.wait()
            async with running:
                await self._run(request)
            done.set()
            thread = (request.session, request.thread)
            if last.get(thread) is done:
                del last[thread]
            ahead.release()

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await ahead.acquire()
                    request = self._next(requests)
                    if request is None:
                        break
                    thread = (request.session, request.thread)
                    before, done = last.get(thread), asyncio.Event()
                    last[thread] = done
                    group.create_task(run_after(request, before, done))
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    def report(self, *, elapsed_ns: int, pending: IndexStatistics) -> ReplayReport:
        """The sums so far as rates and means, with the index's counters as they are now."""
        tally = self.tally
        exact = self.oracle is not None
        raw = filtered = None
        if self.with_candidates:
            raw = tally.raw / max(1, tally.with_candidates)
            filtered = tally.filtered / max(1, tally.with_candidates)
        return ReplayReport(
            trace=self.trace.name,
            requests=tally.requests,
            hit_rate=tally.found / max(1, tally.context),
            exact_hit_rate=tally.exact_found / max(1, tally.context) if exact else None,
            loss=(tally.exact_blocks - tally.matched_blocks) / max(1, tally.exact_blocks) if exact else None,
            reads_mean=tally.reads / max(1, tally.matches),
            waves_mean=tally.waves / max(1, tally.matches),
            candidates=CandidateMeans(raw, filtered, tally.retrieved / max(1, tally.windows_routed)),
            match_us=Latency.of_nanoseconds(tally.match_ns),
            insert_us=Latency.of_nanoseconds(tally.insert_ns),
            requests_per_s=tally.requests * 1e9 / max(1, elapsed_ns),
            statistics=self.index.statistics(),
            statistics_pending=pending,
            found=self.found,
        )

    def _next(self, requests: Iterator[Request]) -> Request | None:
        began = perf_counter_ns()
        request = next(requests, None)
        self.own_work_ns += perf_counter_ns() - began
        return request

    async def _run(self, request: Request) -> None:
        if request.context:
            began = perf_counter_ns()
            result = await self.index.match(self.namespace, request.context)
            self.tally.match_ns.append(perf_counter_ns() - began)
            self._count_candidates(request)  # after the match: it would warm the caches for it
            self._compare(request, result)
        self._remember(request)
        if request.first < request.sequence_blocks:
            worker = Worker(f"worker-{request.session % self.workers}", 0)
            seq = None
            if self.number_changes:
                self.changes[worker] += 1
                seq = self.changes[worker]
            began = perf_counter_ns()
            inserted = await self.index.insert(
                self.namespace,
                request.sequence,
                worker=worker,
                generation=self.marks[worker].generation if worker in self.marks else 0,
                tier=Tier.GPU,
                first=request.first,
                seq=seq,
                durable=self.durable,
            )
            self.tally.insert_ns.append(perf_counter_ns() - began)
            invariant(inserted.applied, "an insert with a new seq was taken for a repetition", worker=worker, seq=seq)
        if self.progress is not None:
            self.progress(1)

    def _count_candidates(self, request: Request) -> None:
        if not self.with_candidates:
            return
        began = perf_counter_ns()
        counts = self.index.count_candidates(self.namespace, request.context)
        if counts.raw:
            self.tally.with_candidates += 1
            self.tally.raw += counts.raw
            self.tally.filtered += counts.filtered
        self.own_work_ns += perf_counter_ns() - began

    def _compare(self, request: Request, result: MatchResult) -> None:
        began = perf_counter_ns()
        tally, matched = self.tally, result.matched_blocks
        tally.matches += 1
        tally.matched_blocks += matched
        tally.found += matched * self._weight
        tally.reads += result.reads
        tally.waves += result.waves
        tally.retrieved += result.retrieved
        tally.windows_routed += result.windows_routed
        if self.oracle is not None:
            exact = self.oracle.matched_blocks(request.context)
            invariant(
                0 <= matched <= exact,
                "wrong answer: a match is longer than the longest prefix ever inserted",
                trace=self.trace.name,
                request=tally.requests,
                session=request.session,
                matched=matched,
                exact=exact,
            )
            tally.exact_blocks += exact
            tally.exact_found += exact * self._weight
        self.own_work_ns += perf_counter_ns() - began

    def _remember(self, request: Request) -> None:
        """Count the request and give its sequence to the oracle, before the index can know it."""
        began = perf_counter_ns()
        self.tally.requests += 1
        self.tally.context += request.context_tokens if self.trace.kind == "tokens" else request.context_blocks
        if self.oracle is not None:
            self.oracle.insert(request.sequence)
        self.own_work_ns += perf_counter_ns() - began

    @property
    def _weight(self) -> int:
        return self.trace.block_tokens if self.trace.kind == "tokens" else 1


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error itself: callers of a replay wait for one error, not for a group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
