"""`sarp dump` and `sarp load`: whole or not at all, and every error names line and field. That nothing is lost on the
way, tests/property/test_index_state_machine.py shows (`dump_and_load`)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from sarp_cluster import limits
from sarp_cluster.cli import main
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import ConflictError, CorruptRecordError
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker
from shard.contents import mask_ranges
from shard.dump import dump
from shard.index import Index

SPEC: Final = NamespaceSpec(tenant="acme", model="llama", salt="Zürich", hash_profile=HashProfile.OPAQUE)
LONG: Final = chained_block_ids(range(40))
FORK: Final = chained_block_ids((*range(20), *range(100, 117)))
SECRET: Final = b"0123456789abcdef"


async def fill(index: Index) -> None:
    """Two sequences that part in the third of their windows of 8 blocks, and blocks that nobody holds any more."""
    namespace = index.create_namespace(SPEC)
    gone = Worker("gone", 2)
    await index.insert(namespace, LONG, worker=gone, generation=3, seq=7)
    await index.insert(namespace, LONG[: 8 * 30], worker=Worker("a"), tier=Tier.CPU, handle=2**64 - 1)
    await index.insert(namespace, FORK, worker=Worker("b"), first=18)
    await index.clear_worker(gone, generation=4)


async def make(directory: Path, secret: bytes | None = None) -> None:
    index = await Index.open(directory, IndexConfig(segment_blocks=8), secret=secret)
    await fill(index)
    await index.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    asyncio.run(make(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def lines(store: Path, tmp_path: Path) -> list[dict[str, Any]]:
    assert main(["dump", str(store), "--output", str(tmp_path / "dump")]) == 0
    return [json.loads(line) for line in (tmp_path / "dump").read_bytes().splitlines()]


def load(directory: Path, lines: list[dict[str, Any]] | bytes) -> int:
    file = directory.with_suffix(".dump")
    file.write_bytes(
        lines if isinstance(lines, bytes) else b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    )
    return main(["load", str(directory), str(file)])


def test_the_lines_say_what_the_store_holds(lines: list[dict[str, Any]]) -> None:
    assert [line["type"] for line in lines] == [
        "header", "namespace", *["worker"] * 3, *["sequence"] * 2, "end",
    ]  # fmt: skip
    assert lines[0] == {"type": "header", "format": "sarp-dump", "version": 1, "segment_blocks": 8}
    assert lines[1] == {
        "type": "namespace", "namespace": 1, "tenant": "acme", "model": "llama", "lora": "", "salt": "Zürich",
        "block_size": 16, "hash_profile": "opaque",
    }  # fmt: skip
    assert [(line["instance_id"], line["dp_rank"], line["generation"], line["seq"]) for line in lines[2:5]] == [
        ("gone", 2, 4, None), ("a", 0, 0, None), ("b", 0, 0, None),
    ]  # fmt: skip
    whole, fork = lines[5:7]
    assert (whole["offset"], whole["first"], fork["offset"], fork["first"]) == (0, 0, 8, 20)
    assert whole["blocks"].split() == [f"{block_id:016x}" for block_id in memoryview(LONG).cast("Q")]
    assert fork["blocks"].split() == [f"{block_id:016x}" for block_id in memoryview(FORK[8 * 8 :]).cast("Q")]
    assert whole["locations"] == [
        {"worker": 1, "tier": "cpu", "first": 0, "count": 30, "handle": "f" * 16},
        {"worker": 2, "tier": "gpu", "first": 18, "count": 2},
    ]
    assert fork["locations"] == [{"worker": 2, "tier": "gpu", "first": 20, "count": 17}]
    assert lines[7] == {
        "type": "end", "namespaces": 1, "workers": 3, "sequences": 2, "blocks": 57, "locations": 3,
    }  # fmt: skip


def test_a_dump_does_not_depend_on_the_secret(store: Path, tmp_path: Path, capsysbinary: Any) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    asyncio.run(make(tmp_path / "keyed", SECRET))
    dumps = []
    for arguments in ([str(store)], [str(tmp_path / "keyed"), "--secret", str(tmp_path / "key")]):
        assert main(["dump", *arguments]) == 0
        dumps.append(capsysbinary.readouterr().out)
    assert dumps[0] == dumps[1]


def test_a_secret_of_another_length_is_refused(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_bytes(b"short")
    assert main(["dump", str(store), "--secret", str(tmp_path / "key")]) == 2
    assert "key has 5 bytes, not 16 to 64" in capsys.readouterr().err


def test_loading_and_dumping_again_changes_nothing(store: Path, tmp_path: Path, capsysbinary: Any) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    first, again = tmp_path / "first.dump", tmp_path / "again.dump"
    assert main(["dump", str(store), "--output", str(first)]) == 0
    assert first.stat().st_mode & 0o777 == 0o600
    assert main(["load", str(tmp_path / "copy"), str(first), "--secret", str(tmp_path / "key")]) == 0
    assert b"57 blocks in 2 sequences, 3 locations" in capsysbinary.readouterr().out
    assert main(["verify", str(tmp_path / "copy")]) == 0
    assert main(["dump", str(tmp_path / "copy"), "--secret", str(tmp_path / "key"), "--output", str(again)]) == 0
    assert first.read_bytes() == again.read_bytes()
    assert main(["dump", str(tmp_path / "copy")]) == 2
    assert b"not the one with which this store was made" in capsysbinary.readouterr().err


def test_an_empty_index_and_workers_without_a_namespace_come_back(tmp_path: Path) -> None:
    async def workers_alone() -> None:
        index = await Index.open(tmp_path / "store", secret=SECRET)
        await index.clear_worker(Worker("w"), generation=5)
        await index.close()

    (tmp_path / "key").write_bytes(SECRET)
    secret = ["--secret", str(tmp_path / "key")]
    asyncio.run(workers_alone())
    for source, dump_file in (("store", "one"), ("copy", "two")):
        assert main(["dump", str(tmp_path / source), "--output", str(tmp_path / dump_file), *secret]) == 0
        assert main(["load", str(tmp_path / f"{dump_file}-copy"), str(tmp_path / dump_file), *secret]) == 0
        (tmp_path / f"{dump_file}-copy").rename(tmp_path / "copy") if source == "store" else None
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_store_of_the_smallest_segments_is_dumped_and_loaded(tmp_path: Path) -> None:
    async def small() -> None:
        index = await Index.open(tmp_path / "store", IndexConfig(segment_blocks=4, base_points=1))
        await fill(index)
        await index.close()

    asyncio.run(small())
    assert main(["dump", str(tmp_path / "store"), "--output", str(tmp_path / "one")]) == 0
    assert main(["load", str(tmp_path / "copy"), str(tmp_path / "one")]) == 0
    assert main(["verify", str(tmp_path / "copy")]) == 0
    assert main(["dump", str(tmp_path / "copy"), "--output", str(tmp_path / "two")]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_only_an_empty_directory_is_loaded_into(
    store: Path, lines: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(store, lines) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "half" / "loading").mkdir(parents=True)
    assert load(tmp_path / "half", lines) == 2
    assert "a load left that was cut off" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "half")]) == 2
    (tmp_path / "empty").mkdir()
    assert load(tmp_path / "empty", lines) == 0


def test_what_is_no_store_is_not_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(tmp_path / "absent")]) == 2
    assert "no such store" in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()
    assert main(["dump", str(tmp_path), "--output", str(tmp_path.parent / "d")]) == 2
    assert "is no store" in capsys.readouterr().err
    assert not (tmp_path.parent / "d").exists()


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        (0, {"format": "sarp-lump"}, "line 1: not a dump"),
        (0, {"version": 2}, "line 1: field version: 2; this program reads version 1: use a newer program"),
        (0, {"segment_blocks": 65}, "line 1: field segment_blocks: 65 is not a whole number in 1..64"),
        (0, {"more": 1}, "line 1: field more: unknown"),
        (1, {"namespace": 2}, "line 2: field namespace: 2, but numbers go up by one: this is 1"),
        (1, {"tenant": 7}, "line 2: field tenant: 7 is not a text"),
        (1, {"tenant": "x" * 256}, "line 2: tenant: must be a string of at most 255 bytes"),
        (1, {"lora": "\ud800"}, "line 2: field lora: half a character"),
        (1, {"hash_profile": "md5"}, "line 2: field hash_profile: 'md5' is not one of xxh3, opaque"),
        (1, {"block_size": 0}, "line 2: field block_size: 0 is not a whole number in 1..4096"),
        (2, {"dp_rank": -1}, "line 3: field dp_rank: -1 is not a whole number in 0..65535"),
        (2, {"generation": True}, "line 3: field generation: True is not"),
        (2, {"seq": 2**63}, "line 3: field seq:"),
        (2, {"instance_id": ""}, "line 3: instance_id: must be a string of 1..255 bytes"),
        (3, {"instance_id": "gone", "dp_rank": 2}, "line 4: field instance_id: the same worker as an earlier one"),
        (5, {"namespace": 2}, "line 6: field namespace: 2 is not a whole number in 1..1"),
        (5, {"offset": 4}, "line 6: field offset: 4 is not a multiple of 8"),
        (5, {"offset": 8, "first": 16, "locations": []}, "line 6: offset: the blocks before it are not in the index"),
        (5, {"first": 40}, "line 6: field first: 40 is not a whole number in 0..39"),
        (5, {"first": 1}, "line 6: field locations[0].first: 0 is not"),
        (5, {"first": 1, "locations": []}, "line 6: field blocks: 39 are new from position 1 on, but 40 were"),
        (5, {"blocks": "12"}, "line 6: field blocks: not block IDs of 16 hexadecimal digits"),
        (5, {"blocks": 12}, "line 6: field blocks: 12 is not a text"),
        (5, {"locations": {}}, "line 6: field locations: {} is not a list"),
        (5, {"locations": [5]}, "line 6: field locations[0]: 5 is not an object"),
        (5, {"locations": [{"worker": 3}]}, "line 6: field locations[0].worker: 3 is not a whole number in 0..2"),
        (5, {"locations": [{"worker": 0, "tier": "tape"}]}, "line 6: field locations[0].tier: 'tape' is not one of"),
        (
            5,
            {"locations": [{"worker": 0, "tier": "gpu", "first": 2, "count": 39}]},
            "line 6: field locations[0].count: 39 is not a whole number in 1..38",
        ),
        (
            5,
            {"locations": [{"worker": 0, "tier": "gpu", "first": 2, "count": 3, "handle": "abc"}]},
            "line 6: field locations[0].handle: 'abc' is not 16 hexadecimal digits",
        ),
        (6, {"offset": 0, "locations": []}, "line 7: field blocks: 9 are new from position 20 on"),
        (7, {"blocks": 58}, "line 8: field blocks: 58, but there were 57: lines are missing"),
        (7, {"type": "tail"}, "line 8: field type: 'tail' is not one of namespace, worker, sequence, end"),
        (3, {"type": "namespace"}, "line 4: field type: namespace after worker"),
    ],
)
def test_a_wrong_field_is_named_and_leaves_no_store(
    place: int,
    changes: dict[str, Any],
    message: str,
    lines: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines[place] |= changes
    assert load(tmp_path / "copy", lines) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_the_example_of_the_document_is_a_dump(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "dump.md").read_text()
    example = text.split("## Example")[1].split("```")[1].lstrip().encode()
    assert load(tmp_path / "copy", example) == 0
    assert main(["dump", str(tmp_path / "copy"), "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == example


def test_missing_and_repeated_lines_are_found(
    lines: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changed, message in (
        (lines[:-1], "the dump ends at line 7 without its last line: it was cut off"),
        ([*lines[:6], lines[7]], "line 7: field sequences: 2, but there were 1: lines are missing"),
        ([*lines[:6], *lines[5:]], "line 7: field blocks: 40 are new from position 0 on, but 0 were"),
        ([*lines[:5], *lines[6:]], "line 6: offset: the blocks before it are not in the index"),
        ([*lines, lines[5]], "line 9: field type: sequence after end"),
        ([], "line 1: not JSON"),
    ):
        assert load(tmp_path / "copy", changed) == 2
        assert message in capsys.readouterr().err
    for line, message in ((b"[1]\n", "not a JSON object"), (b"\xff\n", "not JSON"), (b"[" * 100_000, "not JSON")):
        header = json.dumps(lines[0]).encode() + b"\n"
        assert load(tmp_path / "copy", header + line) == 2
        assert f"line 2: {message}" in capsys.readouterr().err


def test_a_line_is_bounded(
    lines: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(limits, "DUMP_LINE_BYTES_MAX", 600)
    assert load(tmp_path / "copy", lines) == 2
    assert "line 6: longer than 600 bytes (DUMP_LINE_BYTES_MAX)" in capsys.readouterr().err


async def test_blocks_with_very_many_holders_are_told_in_shorter_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = await Index.open(tmp_path / "store", IndexConfig(segment_blocks=8))
    namespace = index.create_namespace(SPEC)
    for number in range(10):
        await index.insert(namespace, LONG, worker=Worker(f"w{number}"), durable=False)
    await index.stop_background()
    monkeypatch.setattr(limits, "LOCATION_RUNS_MAX", 20)
    told = [json.loads(line) async for line in dump(index)]
    await index.close()
    sequences = [line for line in told if line["type"] == "sequence"]
    assert [(line["offset"], line["first"], len(line["locations"])) for line in sequences] == [
        (0, 0, 10), (8, 16, 10), (24, 32, 10),
    ]  # fmt: skip


async def test_a_damaged_segment_and_a_change_end_the_dump(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "store", IndexConfig(segment_blocks=8))
    await fill(index)
    lines = dump(index)
    await index.stop_background()
    assert [json.loads(await anext(lines))["type"] for _ in range(6)][-1] == "sequence"
    await index.insert(index.create_namespace(SPEC), FORK[:8], worker=Worker("c"))
    with pytest.raises(ConflictError, match="the index changed"):
        _ = [line async for line in lines]
    await index.close()

    log = tmp_path / "store" / "log-00001.sarp"
    index = await Index.open(tmp_path / "store", IndexConfig(segment_blocks=8))
    data = bytearray(log.read_bytes())
    at = data.index(index.create_namespace(SPEC).key.internal_ids(FORK[8 * 20 : 8 * 24]))
    data[at] ^= 1
    log.write_bytes(data)
    with pytest.raises(CorruptRecordError, match=r"segment \d+ \(window 2\) is damaged"):
        _ = [line async for line in dump(index)]
    await index.close()


@pytest.mark.parametrize("mask", [0, 1, 0b1011, 2**64 - 1, 1 << 63 | 0b110])
def test_a_mask_is_its_ranges(mask: int) -> None:
    assert sum(((1 << count) - 1) << first for first, count in mask_ranges(mask)) == mask
