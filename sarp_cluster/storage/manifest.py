"""Manifests: what a snapshot consists of (docs/formats.md).

A manifest names the runs that together are the index at an exact LSN, where the log goes on from there, and what is
small enough to be written whole each time: counters, namespaces, workers, unfinished back-fills. It is framed like a
log file and published by writing another name, syncing, renaming and syncing the directory: it is there whole or not
at all. The two newest are kept, with the runs that they name.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.errors import CorruptRecordError, StorageError
from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.record import frame_record, read_frame
from sarp_cluster.storage.registry import NamespaceRecord, WorkerRecord, pack_registry, replay_registry
from sarp_cluster.storage.run_file import RunEntry, run_file_name

MANIFESTS_KEPT: Final = 2
MANIFEST_NAME: Final = re.compile(r"manifest-(\d{6})\.sarp")
MAGIC: Final = b"SARPMAN"
FORMAT_VERSION: Final = 1
FRAME_BYTES: Final = 32
SNAPSHOT: Final = struct.Struct("<8sQQIIQQQQQQQII")
RUN: Final = struct.Struct("<IIII")
LOG_FILE: Final = struct.Struct("<H")
BACKFILL: Final = struct.Struct("<QHH")


class ManifestRecord(IntEnum):
    """What a record of a manifest says; namespaces and workers have the log's types."""

    SNAPSHOT = 32
    RUN = 33
    BACKFILLS = 34
    LOG_FILES = 35
    END = 36


class Counters(NamedTuple):
    """What an index has counted at a snapshot."""

    next_slot: int
    segments: int
    blocks: int
    block_entries: int
    deltas: int
    registrations: int
    entries: int
    live_bytes: int


class Manifest(NamedTuple):
    """A snapshot: the index as it was when `lsn` had been applied, and nothing later."""

    number: int
    lsn: int
    log_file: int
    log_offset: int
    """The log goes on here."""
    log_files: tuple[int, ...]
    """The log files there were, in order."""
    layout: str
    """Settings that decide which entries a segment has: with others the runs are of no use."""
    counters: Counters
    runs: tuple[RunEntry, ...]
    """Newest first."""
    building: tuple[tuple[int, int, int], ...]
    """(key, point, kind) of back-fills that were not finished."""
    namespaces: tuple[NamespaceRecord, ...]
    workers: tuple[WorkerRecord, ...]


def manifest_name(number: int) -> str:
    """Name of a manifest."""
    return f"manifest-{number:06d}.sarp"


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    counters = manifest.counters
    records: list[tuple[int, bytes]] = [
        (
            ManifestRecord.SNAPSHOT,
            SNAPSHOT.pack(
                MAGIC + str(FORMAT_VERSION).encode(),
                manifest.lsn,
                manifest.log_offset,
                manifest.log_file,
                counters.next_slot,
                *counters[1:],
                len(manifest.runs),
                0,
            )
            + manifest.layout.encode(),
        )
    ]
    records.append((ManifestRecord.LOG_FILES, struct.pack(f"<{len(manifest.log_files)}H", *manifest.log_files)))
    records += [(ManifestRecord.RUN, RUN.pack(*run)) for run in manifest.runs]
    if manifest.building:
        records.append((ManifestRecord.BACKFILLS, b"".join(BACKFILL.pack(*one) for one in manifest.building)))
    records += pack_registry(manifest.namespaces, manifest.workers)
    records.append((ManifestRecord.END, struct.pack("<Q", len(records))))
    data = bytearray()
    for lsn, (kind, payload) in enumerate(records, 1):
        data += frame_record(kind, payload, lsn, manifest.number, len(data), manifest.number)
    return bytes(data)


def decode(data: bytes, number: int, path: Path) -> Manifest:
    """A manifest from its bytes. Raises CorruptRecordError naming the offset, StorageError for a newer format."""
    records: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        frame = read_frame(data, at, number, at)
        end = at + FRAME_BYTES + (frame.payload_bytes if frame else 0)
        following = (end + 7) & ~7
        if frame is None or frame.lsn != len(records) + 1 or data[end:following] != bytes(following - end):
            raise CorruptRecordError(f"{path}: the record at offset {at} does not verify")
        records.append((frame.type, data[at + FRAME_BYTES : end]))
        at = following
    try:
        return _decode(records, number, path)
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise CorruptRecordError(f"{path}: makes no sense: {error!r}") from error


def _decode(records: list[tuple[int, bytes]], number: int, path: Path) -> Manifest:
    kind, payload = records[0]
    magic, lsn, log_offset, log_file, next_slot, *rest = SNAPSHOT.unpack_from(payload)
    if kind != ManifestRecord.SNAPSHOT or not magic.startswith(MAGIC):
        raise CorruptRecordError(f"{path}: not a manifest of ours")
    if magic != MAGIC + str(FORMAT_VERSION).encode():
        raise StorageError(
            f"{path}: format version {magic[len(MAGIC) :].decode(errors='replace')}, this program reads version "
            f"{FORMAT_VERSION}: open it with a newer program"
        )
    kind, ending = records[-1]
    if kind != ManifestRecord.END or struct.unpack("<Q", ending) != (len(records) - 1,):
        raise CorruptRecordError(f"{path}: cut short")
    runs = tuple(RunEntry(*RUN.unpack(payload)) for kind, payload in records if kind == ManifestRecord.RUN)
    if len(runs) != rest[-2]:
        raise CorruptRecordError(f"{path}: {len(runs)} runs, its first record says {rest[-2]}")
    log_files = [
        number
        for kind, payload in records
        if kind == ManifestRecord.LOG_FILES
        for (number,) in LOG_FILE.iter_unpack(payload)
    ]
    building = [
        one for kind, payload in records if kind == ManifestRecord.BACKFILLS for one in BACKFILL.iter_unpack(payload)
    ]
    namespaces, workers = replay_registry([record for record in records if record[0] < ManifestRecord.SNAPSHOT])
    return Manifest(
        number=number,
        lsn=lsn,
        log_file=log_file,
        log_offset=log_offset,
        log_files=tuple(log_files),
        layout=payload_text(records[0][1]),
        counters=Counters(next_slot, *rest[:-2]),
        runs=runs,
        building=tuple(building),
        namespaces=tuple(namespaces),
        workers=tuple(workers),
    )


def payload_text(payload: bytes) -> str:
    """The layout, which ends the first record."""
    return payload[SNAPSHOT.size :].decode()


def manifest_files(file_system: FileSystem, directory: Path) -> dict[int, Path]:
    """The manifests by number, newest first."""
    found = {}
    for name in file_system.names(directory):
        match = MANIFEST_NAME.fullmatch(name)
        if match:
            found[int(match[1])] = directory / name
    return dict(sorted(found.items(), reverse=True))


def publish(file_system: FileSystem, directory: Path, manifest: Manifest) -> None:
    """Make a manifest, whose runs are synced, the newest one. For a helper thread."""
    path = directory / manifest_name(manifest.number)
    temporary = path.with_suffix(".tmp")
    # The names of the runs have to be durable before a manifest may be there that names them.
    file_system.sync_directory(directory)
    descriptor = file_system.create(temporary, replace=True)
    try:
        file_system.write(descriptor, encode(manifest), 0)
        file_system.sync(descriptor)
    finally:
        file_system.close(descriptor)
    file_system.rename(temporary, path)
    file_system.sync_directory(directory)


def set_aside(file_system: FileSystem, directory: Path, *manifests: Manifest) -> None:
    """Let no recovery use these manifests again: what they name is damaged. For a helper thread."""
    for manifest in manifests:
        path = directory / manifest_name(manifest.number)
        if file_system.exists(path):
            file_system.rename(path, path.with_suffix(".bad"))
    file_system.sync_directory(directory)


def set_all_aside(file_system: FileSystem, directory: Path) -> None:
    """Let no recovery use any of the manifests there are."""
    for path in manifest_files(file_system, directory).values():
        file_system.rename(path, path.with_suffix(".bad"))
    file_system.sync_directory(directory)


def sweep(file_system: FileSystem, directory: Path, kept: list[Manifest]) -> None:
    """Remove manifests that are not kept, and then runs that none of those kept names. For a helper thread."""
    keep = {manifest_name(manifest.number) for manifest in kept}
    keep |= {run_file_name(run.number) for manifest in kept for run in manifest.runs}
    names = [name for name in file_system.names(directory) if name not in keep]
    old = [name for name in names if name.startswith("manifest-")]
    for name in old:
        file_system.unlink(directory / name)
    if old:
        file_system.sync_directory(directory)  # a manifest must not come back without its runs
    for name in names:
        if name.startswith("run-"):
            file_system.unlink(directory / name)
