"""`sarp replay` end to end, on an index in memory: what it opens, prints and returns."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from sarp_cluster.cli import REPLAY_SECRET, OpenedIndex, main
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import StorageError
from sarp_cluster.replay.arguments import add_replay_arguments, index_config
from sarp_cluster.replay.oracle import PrefixOracle
from sarp_cluster.types import (
    CandidateCounts,
    HashProfile,
    IndexStatistics,
    InsertResult,
    MatchResult,
    Namespace,
    NamespaceSpec,
    Tier,
    Worker,
    WorkerMark,
)
from shard.index import Index

SAMPLE = Path(__file__).parents[2] / "examples" / "sample"
CODING = str(SAMPLE / "coding_agent_blocks.jsonl.gz")
MOONCAKE = str(SAMPLE / "mooncake_conversation.jsonl.gz")
MINT = str(SAMPLE / "mint_codeact.ktrc.zst")


@dataclass(frozen=True)
class NumberingNamespace:
    """One ID a block, good enough where answers do not matter."""

    spec: NamespaceSpec

    def block_ids(self, token_ids: bytes) -> bytes:
        return bytes(len(token_ids) // (4 * self.spec.block_size) * 8)


class MemoryIndex:
    """An opened index that finds what an oracle finds."""

    def __init__(self, directory: Path, config: IndexConfig) -> None:
        self.directory, self.config = directory, config
        self.oracle = PrefixOracle()
        self.specs: list[NamespaceSpec] = []
        self.closed = False

    def create_namespace(self, spec: NamespaceSpec) -> Namespace:
        self.specs.append(spec)
        return NumberingNamespace(spec)

    async def match(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        detail: str = "workers",
        tiers: Collection[Tier] | None = None,
        workers: Collection[Worker] | None = None,
        max_workers: int | None = None,
    ) -> MatchResult:
        matched = self.oracle.matched_blocks(block_ids)
        return SimpleNamespace(matched_blocks=matched, reads=1, waves=1, retrieved=1, windows_routed=1)

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
        return InsertResult(True, self.oracle.insert(block_ids), 1, 0, 0)

    def count_candidates(self, namespace: Namespace, block_ids: bytes) -> CandidateCounts:
        return CandidateCounts(1, 1)

    async def drain_backfill(self) -> None:
        pass

    def statistics(self) -> IndexStatistics:
        blocks = len(self.oracle)
        return IndexStatistics(
            segments=1, blocks=blocks, block_entries=blocks, routing_entries=1, registrations=1, resident_bytes=blocks,
            disk_bytes=blocks, live_disk_bytes=blocks, backfills_pending=0, deltas_unfolded=0,
        )  # fmt: skip

    def worker_marks(self) -> Mapping[Worker, WorkerMark]:
        return {}

    async def held_block_ids(self, namespace: Namespace) -> AsyncIterator[bytes]:
        yield b""

    async def close(self) -> None:
        self.closed = True


class Opener:
    """Opens indexes in memory and remembers them."""

    def __init__(self) -> None:
        self.opened: list[MemoryIndex] = []

    async def __call__(self, directory: Path, config: IndexConfig) -> OpenedIndex:
        self.opened.append(MemoryIndex(directory, config))
        return self.opened[-1]


def test_each_trace_gets_its_own_store_named_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opener = Opener()
    assert main(["replay", CODING, MOONCAKE, "--limit", "50", "--store-dir", str(tmp_path)], open_index=opener) == 0
    assert [index.directory.relative_to(tmp_path).name for index in opener.opened] == [
        "coding_agent_blocks",
        "mooncake_conversation",
    ]
    assert all(index.closed and index.directory.is_dir() for index in opener.opened)
    out = capsys.readouterr().out
    assert "coding_agent_blocks " in out
    assert "One row a trace" in out


def test_a_temporary_store_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    opener = Opener()
    assert main(["replay", MOONCAKE, "--limit", "5", "--json"], open_index=opener) == 0
    assert not opener.opened[0].directory.parent.exists()


def test_json_is_one_object_a_line_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", CODING, MOONCAKE, "--limit", "50", "--json"], open_index=Opener()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(json.loads(line)["trace"], json.loads(line)["requests"]) for line in lines] == [
        ("coding_agent_blocks", 50),
        ("mooncake_conversation", 50),
    ]


def test_namespaces_have_the_traces_block_size_and_hash_profile() -> None:
    opener = Opener()
    assert main(["replay", MINT, CODING, "--limit", "5", "--block-tokens", "32"], open_index=opener) == 0
    specs = [spec for index in opener.opened for spec in index.specs]
    assert [(s.block_size, s.hash_profile) for s in specs] == [(32, HashProfile.XXH3), (32, HashProfile.OPAQUE)]


def test_what_is_no_store_is_not_replayed_upon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mooncake_conversation").mkdir()
    (tmp_path / "mooncake_conversation" / "old").touch()
    assert main(["replay", MOONCAKE, "--store-dir", str(tmp_path)]) == 2
    assert "mooncake_conversation is no store: it has old in it" in capsys.readouterr().err


def test_a_store_that_is_there_is_replayed_upon_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = ["replay", CODING, "--store-dir", str(tmp_path), "--json"]
    reports = []
    for limit in ("200", "200", "400"):
        assert main([*replay, "--limit", limit]) == 0
        printed = capsys.readouterr()
        reports.append(json.loads(printed.out))
        if len(reports) > 1:
            blocks = reports[-2]["blocks"]
            assert f"reopened; it holds {blocks:,} blocks" in printed.err
            assert reports[-1]["found"]["blocks"] == blocks
    cold, warm, longer = reports
    assert cold["found"] is None
    assert warm["blocks"] == cold["blocks"]
    assert longer["blocks"] > cold["blocks"]
    # What was inserted before is found, and the oracle, which knows it too, agrees.
    assert warm["exact_hit_rate"] > cold["exact_hit_rate"]
    assert [report["loss"] for report in reports] == [0, 0, 0]

    assert main([*replay[:-1], "--limit", "50"]) == 0
    out = capsys.readouterr().out
    assert "coding_agent_blocks *" in out
    assert f"its store was not empty. It held {longer['blocks']:,} blocks" in out
    assert "compare them with the exact rate beside them" in out


def test_replayed_workers_go_on_in_their_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker that was cleared holds nothing any more: neither does the oracle count what it held."""

    async def clear() -> None:
        index = await Index.open(tmp_path / "mooncake_conversation", secret=REPLAY_SECRET)
        await index.clear_worker(Worker("worker-0"), generation=3)
        await index.close()

    replay = ["replay", MOONCAKE, "--limit", "300", "--workers", "2", "--store-dir", str(tmp_path), "--json"]
    assert main(replay) == 0
    asyncio.run(clear())
    capsys.readouterr()
    assert main(replay) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["loss"] == 0
    assert report["hit_rate"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.ktrc.zst"], "sarp: error: missing.ktrc.zst: No such file or directory\n"),
        (
            [CODING, "--block-tokens", "48"],
            "sarp: error: block_tokens: 48 does not divide this trace's blocks of 64 tokens\n",
        ),
        ([CODING, "-S", "10"], "sarp: error: segment_blocks: 10 is not 4, 8, 16, 32 or 64 (limit 64)\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments], open_index=Opener()) == 2
    assert capsys.readouterr().err == message


def test_the_index_is_closed_when_a_replay_fails(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(MemoryIndex):
        async def insert(self, *args: object, **options: object) -> InsertResult:
            raise StorageError("disk full of sand")

    opened: list[Broken] = []

    async def open_broken(directory: Path, config: IndexConfig) -> OpenedIndex:
        opened.append(Broken(directory, config))
        return opened[0]

    assert main(["replay", MOONCAKE], open_index=open_broken) == 2
    assert opened[0].closed
    assert "sarp: error: disk full of sand" in capsys.readouterr().err


@pytest.mark.parametrize("with_uvloop", [True, False])
def test_an_interrupt_ends_with_130_and_leaves_no_store(
    with_uvloop: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not with_uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    stores: list[Path] = []

    async def open_and_interrupt(directory: Path, config: IndexConfig) -> OpenedIndex:
        stores.append(directory)
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    assert main(["replay", MOONCAKE], open_index=open_and_interrupt) == 130
    assert capsys.readouterr().err.endswith("sarp: interrupted\n")
    assert not stores[0].exists()


class TestArguments:
    @staticmethod
    def parsed(*options: str) -> IndexConfig:
        parser = argparse.ArgumentParser()
        add_replay_arguments(parser)
        return index_config(parser.parse_args(["trace", *options]))

    def test_without_options_the_index_has_its_own_defaults(self) -> None:
        assert self.parsed() == IndexConfig()

    def test_every_option_reaches_its_setting(self) -> None:
        assert self.parsed(
            "-S", "32", "-R", "8", "--tau", "9", "--pruning-threshold", "7", "--retrieval-max", "5", "--filter", "64",
            "--no-refine", "--no-filter", "--no-prune", "--strategy", "stepwise",
        ) == IndexConfig(
            segment_blocks=32, base_points=8, refinement_threshold=9, pruning_threshold=7, retrieval_max=5,
            filter_bits=64, refine=False, filter=False, prune=False, strategy="stepwise",
        )  # fmt: skip

    def test_long_names_and_no_cap(self) -> None:
        options = (
            "--segment-blocks",
            "16",
            "--base-points",
            "2",
            "--refinement-threshold",
            "3",
            "--retrieval-max",
            "none",
        )
        assert self.parsed(*options) == IndexConfig(
            segment_blocks=16, base_points=2, refinement_threshold=3, retrieval_max=None
        )

    @pytest.mark.parametrize("option", ["--limit", "--in-flight", "--workers", "--tau", "--block-tokens"])
    @pytest.mark.parametrize("value", ["0", "-3", "x"])
    def test_numbers_must_be_above_zero(self, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            self.parsed(f"{option}={value}")
        assert caught.value.code == 2
        assert "is not a whole number above 0" in capsys.readouterr().err

    def test_help_names_every_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["replay", "--help"])
        text = capsys.readouterr().out
        for default in ("(default: 64)", "(default: 256)", "(default: wave)", "(default: 128)", "(default: 8)"):
            assert default in text
