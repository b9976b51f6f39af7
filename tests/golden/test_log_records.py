"""The bytes of the log: what was written once is written the same today, and read back into the same columns."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.recovery import header_prefix
from sarp_cluster.testing.segments import make_unread_batch, pack_place
from tests.golden.log_records import (
    EXTENDED,
    FIRST,
    FORKED,
    GOLDEN,
    HELD,
    KEY_CHECK,
    NAMES,
    OLDER,
    POSTINGS,
    Written,
    read_golden,
    write_records,
)

READ = 1


@pytest.fixture(scope="module")
def written() -> dict[str, Written]:
    return write_records()


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_written_as_ever(name: str, written: dict[str, Written]) -> None:
    assert written[name].data.hex(" ") == read_golden(name).hex(" ")


def test_there_is_no_other_golden_file() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(NAMES)


def test_types_and_lsns_count_up() -> None:
    offset = 0
    types = []
    for lsn, name in enumerate(NAMES, 1):
        data = read_golden(name)
        header = read_frame(data, 0, 1, offset)
        assert header is not None
        assert (header.lsn, header.file, header.offset, header.incarnation) == (lsn, 1, offset, 1)
        types.append(header.type)
        offset += len(data)
    assert types == [
        RecordType.FILE_HEADER, RecordType.NAMESPACE, RecordType.WORKER, RecordType.WORKER, RecordType.WORKER_MARK,
        RecordType.IMAGE, RecordType.IMAGE, RecordType.DELTA, RecordType.DELTA, RecordType.RECLAIMED,
        RecordType.REMOVAL, RecordType.LOST, RecordType.ROUTING, RecordType.GROUP, RecordType.GROUP,
    ]  # fmt: skip


def payload(name: str) -> bytes:
    data = read_golden(name)
    (length,) = struct.unpack_from("<I", data, 4)
    return data[32 : 32 + length]


def test_a_file_header_names_the_version_and_the_segment_size() -> None:
    prefix, older = header_prefix(64), 0
    assert payload("file-header") == prefix + struct.pack("<I", older) == b"SARPLOG3" + struct.pack("<II", 64, 0)


def test_a_group_vouches_for_what_was_durable() -> None:
    assert struct.unpack("<Q", payload("group")) == (0,)  # nothing was when the first group was written
    assert struct.unpack("<Q", payload("group-closing")) == (1 + NAMES.index("group"),)


def test_a_reclaimed_file_reads_back() -> None:
    assert payload("reclaimed") == struct.pack("<I", 7)


def test_a_removal_and_a_lost_record_read_back() -> None:
    gone = (FORKED["slot"], FORKED["tag"], FORKED["fork"], 3, FORKED["parent"], FORKED["origin"], 0, 1)
    assert struct.unpack("<IHBBIIBB6x", payload("removal")) == gone
    assert struct.unpack("<Q", payload("lost")) == (pack_place(1, 280, 136),)


def test_routing_changes_read_back() -> None:
    directory = RoutingDirectory(SarpParameters(IndexConfig()))
    directory.apply_journal([payload("routing")])
    assert sorted(directory.postings()) == sorted(one for one in POSTINGS if not one[3] & 0x80000000)


def test_a_namespace_reads_back() -> None:
    data = payload("namespace")
    number, block_size = struct.unpack_from("<II", data)
    assert data[8:16] == KEY_CHECK
    names, at = [], 16
    while at < len(data):
        (length,) = struct.unpack_from("<H", data, at)
        names.append(data[at + 2 : at + 2 + length].decode())
        at += 2 + length
    assert (number, block_size, names) == (1, 16, ["acme", "llama-3", "", "Zürich", "xxh3"])


def test_workers_and_marks_read_back() -> None:
    assert struct.unpack("<IHH10s", payload("worker")) == (0, 3, 10, b"gpu-node-7")
    assert struct.unpack("<IHH1s", payload("worker-other")) == (1, 0, 1, b"w")
    assert struct.unpack("<IIq", payload("worker-mark")) == (0, 7, -1)


def read_back(
    directory: Path, segment: dict[str, Any], image: str, delta: str | None, golden: Path = GOLDEN
) -> dict[str, Any]:
    """Read a segment from a file that holds the golden records."""
    places = {}
    path = directory / "golden.sarp"
    with path.open("wb") as file:
        for name in [name for name in NAMES if (golden / f"{name}.hex").exists()]:
            data = read_golden(name, golden)
            places[name] = pack_place(1, file.tell(), len(data))
            file.write(data)
    batch: SegmentBatch = make_unread_batch(
        [segment | {"image": places[image], "delta": places[delta] if delta else 0}]
    )
    tail = LogTail(2**20, incarnation=2, file=2, lsn=100, header=header_prefix(64))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        tail.set_descriptor(1, descriptor)
        tail.read_wait(batch)
    finally:
        os.close(descriptor)
    (item,) = batch.describe()
    return item


@pytest.mark.parametrize(
    ("segment", "image", "delta", "golden"),
    [
        (FIRST, "image", None, GOLDEN),
        (FORKED, "image-base", None, GOLDEN),
        (EXTENDED, "image-base", "delta-extension", GOLDEN),
        (HELD, "image-base", "delta-locations", GOLDEN),
        *((FIRST, "image", None, older) for older in OLDER),
        *((EXTENDED, "image-base", "delta-extension", older) for older in OLDER),
    ],
)
def test_a_segment_reads_back(
    tmp_path: Path, segment: dict[str, Any], image: str, delta: str | None, golden: Path
) -> None:
    item = read_back(tmp_path, segment, image, delta, golden)
    assert item["state"] == READ
    assert item["image_count"] == segment.get("image_count", len(segment["ids"]))
    for field in ("slot", "tag", "window", "namespace", "ids", "runs"):
        assert item[field] == segment[field]
    for field in ("parent", "origin", "fork"):
        assert item[field] == segment.get(field, 0)


def test_a_delta_of_another_segment_is_refused(tmp_path: Path) -> None:
    assert read_back(tmp_path, FIRST, "image", "delta-locations")["state"] != READ
