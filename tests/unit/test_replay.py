"""The replay runner and its report, against an index that is right, one that lies and one that is slow."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from sarp_cluster.errors import BadRequestError, InvariantViolationError, StorageError
from sarp_cluster.replay.oracle import PrefixOracle
from sarp_cluster.replay.replay import replay_trace
from sarp_cluster.replay.report import EXPLANATION, Latency, ReplayReport, humanised, table
from sarp_cluster.replay.request import Request, Trace
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import (
    BlockLocation,
    CandidateCounts,
    HashProfile,
    IndexStatistics,
    InsertResult,
    Namespace,
    NamespaceSpec,
    Tier,
    Worker,
    WorkerMatch,
)

SAMPLE = Path(__file__).parents[2] / "examples" / "sample"
SHAREGPT = SAMPLE / "sharegpt_short.ktrc.zst"
CODING = SAMPLE / "coding_agent_blocks.jsonl.gz"
MOONCAKE = SAMPLE / "mooncake_conversation.jsonl.gz"


@dataclass(frozen=True)
class PythonNamespace:
    """Hashes by Dynamo's rule, in plain Python."""

    spec: NamespaceSpec

    def block_ids(self, token_ids: bytes) -> bytes:
        size, ids, parent = 4 * self.spec.block_size, list[int](), None
        for at in range(0, len(token_ids) - size + 1, size):
            block_id = xxhash.xxh3_64_intdigest(token_ids[at : at + size], seed=1337)
            if parent is not None:
                block_id = xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, block_id), seed=1337)
            ids.append(block_id)
            parent = block_id
        return struct.pack(f"<{len(ids)}Q", *ids)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A MatchResult."""

    matched_blocks: int
    verified_blocks: int
    workers: list[WorkerMatch] = field(default_factory=list)
    blocks: list[list[BlockLocation]] | None = None
    truncated: bool = False
    reads: int = 2
    waves: int = 1
    retrieved: int = 3
    windows_routed: int = 2


@dataclass(frozen=True, kw_only=True)
class Insertion:
    block_ids: bytes
    worker: Worker
    tier: Tier
    first: int
    seq: int | None


class ExactIndex:
    """A PrefixIndex in memory that answers exactly and notes what it was asked."""

    def __init__(self) -> None:
        self.oracle = PrefixOracle()
        self.insertions: list[Insertion] = []
        self.matched: list[bytes] = []
        self.drained = 0

    async def match(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        detail: str = "workers",
        tiers: Collection[Tier] | None = None,
        workers: Collection[Worker] | None = None,
        max_workers: int | None = None,
    ) -> Answer:
        assert block_ids
        self.matched.append(block_ids)
        matched = self.oracle.matched_blocks(block_ids)
        return Answer(matched_blocks=matched, verified_blocks=matched)

    async def insert(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        worker: Worker,
        generation: int = 0,
        tier: Tier = Tier.GPU,
        first: int = 0,
        offset: int = 0,
        seq: int | None = None,
        handle: int | None = None,
        durable: bool = True,
    ) -> InsertResult:
        assert 0 <= first < len(block_ids) // 8
        self.insertions.append(Insertion(block_ids=block_ids, worker=worker, tier=tier, first=first, seq=seq))
        added = self.oracle.insert(block_ids)
        return InsertResult(applied=True, blocks_added=added, segments_written=1, reads=0, waves=0)

    def count_candidates(self, namespace: Namespace, block_ids: bytes) -> CandidateCounts:
        found = self.oracle.matched_blocks(block_ids) > 0
        return CandidateCounts(raw=10, filtered=4) if found else CandidateCounts(raw=0, filtered=0)

    async def drain_backfill(self) -> None:
        self.drained += 1

    def statistics(self) -> IndexStatistics:
        blocks = len(self.oracle)
        return IndexStatistics(
            segments=blocks // 64,
            blocks=blocks,
            block_entries=blocks,
            routing_entries=100 + self.drained,
            registrations=200,
            resident_bytes=2 * blocks,
            disk_bytes=24 * blocks,
            live_disk_bytes=20 * blocks,
            backfills_pending=1 - self.drained,
            deltas_unfolded=0,
        )


class LyingIndex(ExactIndex):
    """Claims one block more than there is, once it has seen enough."""

    async def match(self, namespace: Namespace, block_ids: bytes, **options: object) -> Answer:
        honest = await super().match(namespace, block_ids)
        lie = honest.matched_blocks + (len(self.matched) > 50)
        return Answer(matched_blocks=lie, verified_blocks=lie)


class ForgetfulIndex(ExactIndex):
    """Finds half of what there is."""

    async def match(self, namespace: Namespace, block_ids: bytes, **options: object) -> Answer:
        honest = await super().match(namespace, block_ids)
        return Answer(matched_blocks=honest.matched_blocks // 2, verified_blocks=honest.matched_blocks)


class SlowIndex(ExactIndex):
    """Gives way to others in every call and notes how many calls of which sequences run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    async def match(self, namespace: Namespace, block_ids: bytes, **options: object) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(1 + len(block_ids) % 3):
            await asyncio.sleep(0)
        self.running -= 1
        return await super().match(namespace, block_ids)


def namespace_of(trace: Trace) -> PythonNamespace:
    profile = HashProfile.XXH3 if trace.kind == "tokens" else HashProfile.OPAQUE
    return PythonNamespace(NamespaceSpec(model="m", block_size=trace.block_tokens, hash_profile=profile))


def replayed(
    path: Path,
    index: ExactIndex,
    *,
    in_flight: int = 1,
    workers: int = 8,
    limit: int | None = None,
    with_oracle: bool = True,
    with_candidates: bool = True,
) -> ReplayReport:
    trace = open_trace(path)
    return asyncio.run(
        replay_trace(
            trace,
            index,
            namespace_of(trace),
            workers=workers,
            in_flight=in_flight,
            limit=limit,
            with_oracle=with_oracle,
            with_candidates=with_candidates,
        )
    )


def requests_of(path: Path, limit: int | None = None) -> list[Request]:
    trace = open_trace(path)
    return list(trace.requests(namespace_of(trace).block_ids, limit=limit))


@pytest.mark.parametrize(
    ("path", "hit_rate"), [(SHAREGPT, 0.8368), (MOONCAKE, 0.3256), (CODING, 0.9635)], ids=lambda value: str(value)[-24:]
)
def test_an_exact_index_loses_nothing(path: Path, hit_rate: float) -> None:
    report = replayed(path, ExactIndex())
    assert report.requests == open_trace(path).request_count
    assert (round(report.hit_rate, 4), report.exact_hit_rate, report.loss) == (hit_rate, report.hit_rate, 0.0)


def test_loss_is_the_share_of_exactly_matched_blocks_that_were_missed() -> None:
    report = replayed(CODING, ForgetfulIndex(), limit=500)
    assert report.exact_hit_rate is not None
    assert report.loss == pytest.approx(0.5, abs=0.01)
    assert report.hit_rate == pytest.approx(report.exact_hit_rate / 2, abs=0.01)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_an_answer_longer_than_the_exact_one_stops_the_replay(in_flight: int) -> None:
    with pytest.raises(InvariantViolationError, match=r"wrong answer.*trace='sharegpt_short'.*matched="):
        replayed(SHAREGPT, LyingIndex(), in_flight=in_flight)


def test_without_the_oracle_nothing_is_compared() -> None:
    report = replayed(SHAREGPT, LyingIndex(), with_oracle=False, limit=200)
    assert (report.exact_hit_rate, report.loss) == (None, None)
    assert "exact_hit_rate" in json.loads(report.to_json())
    assert " - " in table([report])


def test_inserts_name_worker_tier_and_what_is_new_and_number_the_changes_of_each_worker() -> None:
    index = ExactIndex()
    replayed(SHAREGPT, index, workers=3)
    expected = [r for r in requests_of(SHAREGPT) if r.first < r.sequence_blocks]
    assert [(i.block_ids, i.first) for i in index.insertions] == [(r.sequence, r.first) for r in expected]
    assert [i.worker for i in index.insertions] == [Worker(f"worker-{r.session % 3}", 0) for r in expected]
    assert {i.tier for i in index.insertions} == {Tier.GPU}
    numbers = defaultdict[Worker, list[int | None]](list)
    for insertion in index.insertions:
        numbers[insertion.worker].append(insertion.seq)
    assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in numbers.values())


def test_contexts_shorter_than_a_block_are_not_matched_but_counted() -> None:
    index = ExactIndex()
    report = replayed(SHAREGPT, index)
    requests = requests_of(SHAREGPT)
    assert index.matched == [r.context for r in requests if r.context]
    assert len(index.matched) < report.requests == len(requests)
    assert (report.reads_mean, report.waves_mean) == (2.0, 1.0)


def test_a_repetition_that_should_not_be_one_stops_the_replay() -> None:
    class Repeating(ExactIndex):
        async def insert(self, *args: object, **options: object) -> InsertResult:
            return InsertResult(applied=False, blocks_added=0, segments_written=0, reads=0, waves=0)

    with pytest.raises(InvariantViolationError, match="taken for a repetition"):
        replayed(SHAREGPT, Repeating())


class TestInFlight:
    @pytest.mark.parametrize("path", [SHAREGPT, MOONCAKE], ids=lambda path: path.name)
    def test_several_run_at_once_and_never_more_than_asked_for(self, path: Path) -> None:
        index = SlowIndex()
        report = replayed(path, index, in_flight=5)
        assert index.most == 5
        assert report.requests == open_trace(path).request_count
        assert {i.seq for i in index.insertions} == {None}

    def test_requests_of_one_thread_keep_their_order(self) -> None:
        index = SlowIndex()
        replayed(CODING, index, in_flight=6, limit=3_000)
        assert index.most > 1
        position = {id_: n for n, id_ in enumerate(i.block_ids for i in index.insertions)}
        last: dict[tuple[int, int], int] = {}
        for request in requests_of(CODING, limit=3_000):
            if request.first < request.sequence_blocks:
                thread = (request.session, request.thread)
                assert position[request.sequence] >= last.get(thread, -1)
                last[thread] = position[request.sequence]

    def test_the_same_blocks_end_up_in_the_index(self) -> None:
        one, many = ExactIndex(), SlowIndex()
        replayed(SHAREGPT, one)
        replayed(SHAREGPT, many, in_flight=7)
        assert len(one.oracle) == len(many.oracle)

    def test_an_error_of_the_index_comes_out_as_itself(self) -> None:
        class Broken(SlowIndex):
            async def insert(self, *args: object, **options: object) -> InsertResult:
                await asyncio.sleep(0)
                raise StorageError("disk on fire")

        with pytest.raises(StorageError, match="disk on fire"):
            replayed(SHAREGPT, Broken(), in_flight=4)


class TestReport:
    def test_json_has_exactly_the_documented_fields_on_one_line(self) -> None:
        line = replayed(SHAREGPT, ExactIndex(), limit=300).to_json()
        fields = json.loads(line)
        assert "\n" not in line
        assert list(fields) == [
            "trace", "requests", "hit_rate", "exact_hit_rate", "loss", "reads_mean", "waves_mean", "candidates",
            "routing_entries", "registrations", "segments", "blocks", "resident_bytes_per_block",
            "disk_bytes_per_block", "match_us", "insert_us", "requests_per_s", "found",
        ]  # fmt: skip
        assert list(fields["candidates"]) == ["raw", "filtered", "retrieved"]
        assert list(fields["match_us"]) == list(fields["insert_us"]) == ["mean", "p50", "p99"]
        assert (fields["resident_bytes_per_block"], fields["disk_bytes_per_block"]) == (2.0, 24.0)

    def test_candidates_are_means_over_requests_that_had_some_and_over_routed_windows(self) -> None:
        report = replayed(SHAREGPT, ExactIndex(), limit=1_000)
        assert report.candidates == (10.0, 4.0, 1.5)

    def test_candidates_are_counted_between_match_and_insert(self) -> None:
        """Before the match, counting would warm the caches for it."""

        class Noting(ExactIndex):
            def count_candidates(self, namespace: Namespace, block_ids: bytes) -> CandidateCounts:
                assert self.matched[-1] == block_ids
                counted.append((len(self.matched), len(self.insertions)))
                return super().count_candidates(namespace, block_ids)

        counted: list[tuple[int, int]] = []
        index = Noting()
        replayed(SHAREGPT, index, limit=100)
        assert [matches for matches, _ in counted] == list(range(1, len(index.matched) + 1))
        assert counted[0] == (1, 0)

    def test_candidates_may_be_left_uncounted(self) -> None:
        report = replayed(SHAREGPT, ExactIndex(), limit=1_000, with_candidates=False)
        assert report.candidates == (None, None, 1.5)
        assert "->->1.50" in table([report])

    def test_statistics_are_taken_before_and_after_the_back_fill_is_drained(self) -> None:
        report = replayed(SHAREGPT, ExactIndex(), limit=10)
        assert (report.statistics_pending.backfills_pending, report.statistics.backfills_pending) == (1, 0)
        assert json.loads(report.to_json())["routing_entries"] == 101

    def test_the_table_is_aligned_and_has_one_row_a_trace(self) -> None:
        reports = [replayed(path, ExactIndex(), limit=200) for path in (SHAREGPT, MOONCAKE)]
        lines = table(reports).splitlines()
        assert len(lines) == 2 + 1 + len(reports)
        assert len({len(line) for line in lines}) == 1
        assert lines[3].startswith("sharegpt_short ")

    def test_every_column_is_explained(self) -> None:
        for word in ("hit rate", "exact rate", "loss", "reads", "waves", "candidates", "B/block", "requests/s"):
            assert word in EXPLANATION

    @pytest.mark.parametrize(
        ("number", "text"),
        [(0, "0"), (7, "7"), (999, "999"), (7.25, "7.25"), (9.996, "10.0"), (99.96, "100"), (0.004, "0.00"),
         (1_000, "1.00k"), (999.9, "1.00k"), (12_345, "12.3k"), (999_900, "1.00M"), (2_593_797, "2.59M"),
         (3e9, "3.00G")],
    )  # fmt: skip
    def test_wide_numbers_are_humanised(self, number: float, text: str) -> None:
        assert humanised(number) == text

    def test_latencies_are_in_microseconds(self) -> None:
        assert Latency.of_nanoseconds([1_000, 2_000, 6_000]) == pytest.approx((3.0, 2.0, 5.92))
        assert Latency.of_nanoseconds([]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "name"), [({"workers": 0}, "workers"), ({"in_flight": 0}, "in_flight"), ({"limit": -1}, "limit")]
)
def test_arguments_out_of_range_are_refused(options: dict[str, int], name: str) -> None:
    with pytest.raises(BadRequestError, match=name):
        replayed(SHAREGPT, ExactIndex(), **options)  # type: ignore[arg-type]


def test_a_namespace_of_another_block_size_is_refused() -> None:
    trace = open_trace(SHAREGPT, block_tokens=32)
    namespace = PythonNamespace(NamespaceSpec(model="m", block_size=16))
    with pytest.raises(BadRequestError, match="16-token blocks, trace sharegpt_short 32"):
        asyncio.run(replay_trace(trace, ExactIndex(), namespace))


def test_progress_is_told_of_every_request() -> None:
    trace, steps = open_trace(SHAREGPT), list[int]()
    asyncio.run(replay_trace(trace, ExactIndex(), namespace_of(trace), limit=123, progress=steps.append))
    assert steps == [1] * 123
