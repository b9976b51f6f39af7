"""Manifests: whole or not there; what they say comes back; two are kept, with what they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarp_cluster.errors import CorruptRecordError, StorageError
from sarp_cluster.storage.file_system import DISK
from sarp_cluster.storage.manifest import (
    MAGIC,
    Counters,
    Manifest,
    decode,
    encode,
    manifest_files,
    manifest_name,
    publish,
    set_aside,
    sweep,
)
from sarp_cluster.storage.record import frame_record, read_frame
from sarp_cluster.storage.registry import NamespaceRecord, WorkerRecord
from sarp_cluster.storage.run_file import RunEntry, run_file_name
from sarp_cluster.storage.snapshot import find_snapshots


def manifest(number: int = 5, runs: tuple[int, ...] = (4, 2)) -> Manifest:
    return Manifest(
        number=number,
        lsn=123_456_789_012,
        log_file=7,
        log_offset=2**33,
        log_files=(3, 6, 7),
        layout="64 blocks, 4 points",
        counters=Counters(5_000, 900, 50_000, 50_100, 3, 1_000, 990, 2**40),
        runs=tuple(RunEntry(run, 3, 1, run * 1_000) for run in runs),
        building=((2**64 - 1, 48, 4), (1, 0, 0)),
        namespaces=(NamespaceRecord(1, ("tenant", "modèle", "", "", "xxh3"), 16, b"checksum"),),
        workers=(WorkerRecord(0, "node-a", 3, 2, 17), WorkerRecord(1, "node-b", 0, 0, -1)),
    )


def test_what_is_written_is_read() -> None:
    assert decode(encode(manifest()), 5, Path("m")) == manifest()
    bare = manifest(1, ())._replace(building=(), namespaces=(), workers=())
    assert decode(encode(bare), 1, Path("m")) == bare


def test_every_changed_byte_and_every_length_is_found() -> None:
    data = encode(manifest())
    for at in range(len(data)):
        with pytest.raises(CorruptRecordError, match=r"^m: "):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], 5, Path("m"))
        with pytest.raises(CorruptRecordError, match=r"^m: "):
            decode(data[:at], 5, Path("m"))
    with pytest.raises(CorruptRecordError):
        decode(data + bytes(8), 5, Path("m"))
    with pytest.raises(CorruptRecordError):
        decode(data, 6, Path("m"))  # another manifest's bytes under this name


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    """Falling back to an older snapshot, or to the log, could lose what only the newer program understands."""
    data = encode(manifest())
    first = read_frame(data, 0, 5, 0)
    assert first is not None
    payload = MAGIC + b"2" + data[32 + len(MAGIC) + 1 : 32 + first.payload_bytes]
    newer = frame_record(first.type, payload, 1, 5, 0, 5) + data[(32 + first.payload_bytes + 7) & ~7 :]
    with pytest.raises(StorageError, match=r"format version 2.*newer program"):
        decode(newer, 5, Path("m"))
    (tmp_path / manifest_name(5)).write_bytes(newer)
    with pytest.raises(StorageError, match="newer program"):
        find_snapshots(DISK, tmp_path, "64 blocks, 4 points")


def test_what_no_kept_manifest_names_is_removed(tmp_path: Path) -> None:
    for run in range(1, 6):
        (tmp_path / run_file_name(run)).touch()
    (tmp_path / "log-00001.sarp").touch()
    (tmp_path / manifest_name(9)).with_suffix(".tmp").touch()
    manifests = [manifest(6, (1, 2)), manifest(7, (3, 2)), manifest(8, (4, 3))]
    for one in manifests:
        publish(DISK, tmp_path, one)
    assert list(manifest_files(DISK, tmp_path)) == [8, 7, 6]
    sweep(DISK, tmp_path, manifests[1:])
    assert list(manifest_files(DISK, tmp_path)) == [8, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log-00001.sarp",
        manifest_name(7),
        manifest_name(8),
        run_file_name(2),
        run_file_name(3),
        run_file_name(4),
    ]


def test_a_manifest_that_is_set_aside_is_not_used_again(tmp_path: Path) -> None:
    publish(DISK, tmp_path, manifest(3, ()))
    publish(DISK, tmp_path, manifest(4, ()))
    set_aside(DISK, tmp_path, manifest(4, ()))
    found = find_snapshots(DISK, tmp_path, manifest().layout)
    assert [snapshot.manifest.number for snapshot in found.usable] == [3]
    assert found.next_number == 5  # numbers are not used twice


def test_snapshots_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    publish(DISK, tmp_path, manifest(2, ()))
    publish(DISK, tmp_path, manifest(3, (9,)))
    (tmp_path / manifest_name(4)).write_bytes(b"nothing of ours")
    found = find_snapshots(DISK, tmp_path, manifest().layout)
    assert [snapshot.manifest.number for snapshot in found.usable] == [2]
    assert len(found.refused) == 2
    assert manifest_name(4) in found.refused[0]
    assert run_file_name(9) in found.refused[1]
    assert find_snapshots(DISK, tmp_path, "32 blocks").usable == []
