"""`sarp verify`: exact to file and offset, and its exit status says whether anything acknowledged is damaged."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from sarp_cluster.cli import main
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import StorageError
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.recovery import header_prefix
from sarp_cluster.storage.registry import pack_namespace, pack_worker
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.testing.segments import make_batch
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

CLOSING_BYTES: Final = 40
"""Of the group with which closing vouches for the one before."""


async def make_store(
    directory: Path, *, log_file_bytes: int = 1 << 20, segment_blocks: int = 64, durable: bool = True
) -> None:
    """Sequences that extend one another and part, each synced by itself, or all in one group."""
    config = IndexConfig(log_file_bytes=log_file_bytes, segment_blocks=segment_blocks, base_points=2)
    index = await Index.open(directory, config, secret=bytes(32))
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    rng = random.Random(1)
    for number in range(40):
        tokens = (*range(rng.randint(1, 100)), 1_000 + number)
        await index.insert(namespace, chained_block_ids(tokens), worker=Worker(f"w{number % 3}"), durable=durable)
    await index.close()


def offsets(data: bytes, file: int) -> list[int]:
    """Where the records of a log file stand."""
    found, at = [], 0
    while at < len(data):
        header = read_frame(data, at, file, at)
        assert header is not None
        found.append(at)
        at += (32 + header.payload_bytes + 7) // 8 * 8
    return found


def groups_end(data: bytes, file: int) -> list[int]:
    """Where the groups of a log file end."""
    found = offsets(data, file)
    return [end for at, end in pairwise([*found, len(data)]) if data[at + 2] == RecordType.GROUP]


def test_a_store_that_was_closed_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(make_store(tmp_path / "s", log_file_bytes=4_096))
    found = verify(tmp_path / "s")
    assert found.clean
    assert not found.findings
    assert found.files > 1
    assert found.segments > 0
    assert main(["verify", str(tmp_path / "s")]) == 0
    assert "clean" in capsys.readouterr().out


def test_damage_is_named_by_file_and_offset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(make_store(tmp_path / "s"))
    path = tmp_path / "s" / log_file_name(1)
    data = bytearray(path.read_bytes())
    at = offsets(bytes(data), 1)[20]
    data[at + 40] ^= 1
    path.write_bytes(data)
    found = verify(tmp_path / "s")
    assert not found.clean
    assert (found.findings[0].file, found.findings[0].offset) == (path.name, at)
    assert main(["verify", str(tmp_path / "s")]) == 1
    assert f"offset {at:,}" in capsys.readouterr().out
    assert path.read_bytes() == bytes(data)


def test_a_torn_tail_is_named_and_harmless(tmp_path: Path) -> None:
    asyncio.run(make_store(tmp_path / "s"))
    path = tmp_path / "s" / log_file_name(1)
    data = path.read_bytes()[:-CLOSING_BYTES]
    *_, begin, last = groups_end(data, 1)
    for length in (begin + 10, offsets(data, 1)[-1], last - 1):
        path.write_bytes(data[:length])
        found = verify(tmp_path / "s")
        assert found.clean
        assert [(finding.offset, finding.harmless) for finding in found.findings] == [(begin, True)]
        assert f"{length - begin} bytes" in found.findings[0].what
        assert path.stat().st_size == length


def test_a_record_without_its_padding_is_damage(tmp_path: Path) -> None:
    """Its checksum does not cover the padding."""
    asyncio.run(make_store(tmp_path / "s", log_file_bytes=4_096))
    for path in sorted((tmp_path / "s").glob("log-*"))[:-2]:
        data, number = path.read_bytes(), int(path.stem[4:])
        begins = offsets(data, number)
        ends = [*begins[1:], len(data)]
        for begin, end in zip(begins, ends, strict=True):
            frame = read_frame(data, begin, number, begin)
            if frame is not None and frame.payload_bytes % 8:
                path.write_bytes(data[: end - 1])
                found = verify(tmp_path / "s")
                assert not found.clean
                assert (found.findings[0].file, found.findings[0].offset) == (path.name, begin)
        path.write_bytes(data)


def test_what_is_behind_a_torn_tail_is_no_part_of_the_store(tmp_path: Path) -> None:
    """Files reached the disk out of order: segments behind the gap name others that are not there. All of it goes."""
    asyncio.run(make_store(tmp_path / "s", log_file_bytes=4_096, segment_blocks=8, durable=False))
    (tmp_path / "s" / log_file_name(2)).unlink()
    assert not verify(tmp_path / "s").clean  # it was closed, and all was durable
    last = max((tmp_path / "s").glob("log-*"))
    last.write_bytes(last.read_bytes()[:-CLOSING_BYTES])
    found = verify(tmp_path / "s")
    assert found.clean
    assert [finding.harmless for finding in found.findings] == [True]


def test_a_store_of_small_segments_is_looked_over(tmp_path: Path) -> None:
    asyncio.run(make_store(tmp_path / "s", segment_blocks=4))
    found = verify(tmp_path / "s")
    assert not found.findings
    assert found.segments > 1


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    asyncio.run(make_store(tmp_path / "s", log_file_bytes=4_096))
    (tmp_path / "s" / log_file_name(2)).unlink()
    found = verify(tmp_path / "s")
    assert not found.clean
    assert (found.findings[0].file, found.findings[0].what) == (log_file_name(2), "is missing")


async def test_an_open_store_is_left_alone(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "s", secret=bytes(32))
    try:
        with pytest.raises(StorageError, match="open in another process"):
            await asyncio.to_thread(verify, tmp_path / "s")
    finally:
        await index.close()


def test_what_is_no_store_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    assert main(["verify", str(tmp_path)]) == 2
    assert "no store" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "absent")]) == 2


def write_store(directory: Path, segments: list[dict[str, Any]], *, workers: int = 1, namespaces: int = 1) -> None:
    """A store with these segments of up to 4 blocks, whether they fit together or not."""
    tail = LogTail(1 << 20, 1, 1, 0, header_prefix(4))
    for number in range(namespaces):
        payload = pack_namespace(1 + number, ("t", "m", "", "", "opaque"), 16, bytes(8))
        tail.append_record(RecordType.NAMESPACE, payload)
    for number in range(workers):
        tail.append_record(RecordType.WORKER, pack_worker(number, f"w{number}", 0))
    batch = make_batch(segments)
    tail.append_segments(batch)
    directory.mkdir()
    for number, _, data in tail.begin_write(0):
        (directory / log_file_name(number)).write_bytes(data)
    tail.end_write()


RUN: Final = {"worker": 0, "generation": 0, "tier": 0, "mask": 1, "handle": None}
FULL: Final = {"slot": 4096, "ids": [1, 2, 3, 4]}
CHILD: Final = {"slot": 4097, "window": 1, "parent": 4096, "ids": [5]}
COPY: Final = {"slot": 4098, "origin": 4096, "fork": 2, "ids": [1, 2, 9]}


@pytest.mark.parametrize(
    ("segments", "what"),
    [
        ([FULL, {**CHILD, "parent": 4099}], "segment 4097: its parent is not in the log"),
        ([FULL, {**CHILD, "parent": 2**31}], "segment 4097: its parent is not in the log"),
        ([FULL, {**CHILD, "window": 2}], "segment 4097: its parent is not of the window before"),
        ([{**FULL, "ids": [1]}, CHILD], "segment 4097: its parent is not full"),
        ([FULL, {**CHILD, "namespace": 2}], "segment 4097: its parent is of another namespace"),
        ([FULL, {**COPY, "origin": 4097}], "segment 4098: its origin is not in the log"),
        ([FULL, {**COPY, "window": 1}], "segment 4098: its origin is of another window"),
        ([FULL, {**COPY, "fork": 0}], "segment 4098: it has a fork without an origin, or the other way round"),
        ([{**FULL, "ids": [1]}, COPY], "segment 4098: its origin does not hold the block before the fork"),
        ([{**FULL, "ids": [1, 2, 3, 4, 5]}], "segment 4096: it has more blocks than a segment may"),
        ([{**FULL, "namespace": 3}], "segment 4096: namespace 3 is not in the log"),
        ([{**FULL, "runs": [{**RUN, "worker": 1}]}], "segment 4096: worker 1 is not in the log"),
        (
            [FULL, {**COPY, "runs": [{**RUN, "mask": 0b110}]}],
            "segment 4098: worker 0 holds blocks that are at home elsewhere",
        ),
    ],
)
def test_segments_that_do_not_fit_together_are_named_with_their_record(
    segments: list[dict[str, Any]], what: str, tmp_path: Path
) -> None:
    write_store(tmp_path / "s", [FULL, CHILD, COPY])
    assert verify(tmp_path / "s").clean
    write_store(tmp_path / "bad", segments, namespaces=2)
    (finding,) = verify(tmp_path / "bad").findings
    data = (tmp_path / "bad" / log_file_name(1)).read_bytes()
    assert finding.what == what
    assert finding.file == log_file_name(1)
    # The last segment is the one that is wrong; behind it stands the group's record.
    assert finding.offset == offsets(data, 1)[-2]


def test_progress_ends_where_it_said(tmp_path: Path) -> None:
    asyncio.run(make_store(tmp_path / "s", log_file_bytes=4_096))
    told: list[tuple[int, int]] = []
    found = verify(tmp_path / "s", lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (2 * found.bytes, 2 * found.bytes)


def test_a_damaged_snapshot_is_named_chunk_by_chunk(tmp_path: Path) -> None:
    async def take_snapshot() -> None:
        index = await Index.open(tmp_path, IndexConfig(segment_blocks=4, base_points=1), secret=bytes(32))
        namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
        await index.insert(namespace, chained_block_ids(tuple(range(40))), worker=Worker("w"))
        await index.snapshot()
        await index.close()

    asyncio.run(take_snapshot())
    assert verify(tmp_path).clean
    (run,) = tmp_path.glob("run-*")
    (manifest,) = tmp_path.glob("manifest-*")
    data = bytearray(run.read_bytes())
    data[70_000] ^= 1
    run.write_bytes(data)
    found = verify(tmp_path)
    assert [(finding.file, finding.offset) for finding in found.findings] == [(run.name, 65_536)]
    assert not found.clean
    data = bytearray(manifest.read_bytes())
    data[-1] ^= 1
    manifest.write_bytes(data)
    assert [finding.file for finding in verify(tmp_path).findings] == [manifest.name]
