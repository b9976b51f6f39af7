"""Finding the snapshot to recover from (docs/formats.md, Recovery).

The newest manifest that verifies, and whose runs do, as far as their indexes: the rest of a run is verified chunk by
chunk when it is first wanted. If that one is damaged the one before is taken, with more of the log to replay; if none
is left, or a record behind it is lost, everything is rebuilt from the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, SnapshotDamagedError
from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.manifest import Manifest, decode, manifest_files, set_all_aside
from sarp_cluster.storage.recovery import LogStart, Progress, RecoveredLog, recover
from sarp_cluster.storage.run_file import RunFile
from sarp_cluster.storage.store_directory import snapshot_numbers


class Snapshot(NamedTuple):
    """A snapshot that can be recovered from."""

    manifest: Manifest
    files: tuple[RunFile, ...]
    """Its runs, newest first."""


class FoundSnapshots(NamedTuple):
    """What the manifests of a store are worth."""

    usable: list[Snapshot]
    """The newest that can be used, or none."""
    refused: list[str]
    """Why the others cannot be used, for people."""
    next_number: int
    """For the next run or manifest: none that was used before."""
    older: bool = False
    """Is there one before the usable one, which was not looked at?"""


class RecoveredStore(NamedTuple):
    """A store as recovery found it."""

    log: RecoveredLog
    table: SegmentTable
    snapshots: FoundSnapshots

    @property
    def snapshot(self) -> Snapshot | None:
        """The one from which the table is loaded; None: all of the log was replayed."""
        return self.snapshots.usable[0] if self.snapshots.usable else None


def recover_newest(
    file_system: FileSystem, directory: Path, segment_blocks: int, layout: str | None, progress: Progress | None
) -> RecoveredStore:
    """Recover a locked store from its newest snapshot that can be used, or from the log alone.

    Without a `layout` snapshots are not looked at. Waits for the disk: call it in a helper thread. Raises
    CorruptRecordError for damage to the log.
    """
    found = FoundSnapshots([], [], 1) if layout is None else find_snapshots(file_system, directory, layout)
    table = SegmentTable()
    start = None
    if found.usable:
        manifest = found.usable[0].manifest
        counters = manifest.counters
        table.begin_lazy(
            counters.next_slot, counters.segments, counters.blocks, counters.block_entries, counters.deltas
        )
        start = LogStart(
            manifest.log_file,
            manifest.log_offset,
            manifest.lsn,
            counters.live_bytes,
            manifest.namespaces,
            manifest.workers,
            frozenset(manifest.log_files),
        )
    try:
        log = recover(directory, table, segment_blocks, start=start, progress=progress, file_system=file_system)
    except SnapshotDamagedError as error:
        # A record is lost behind it, and behind each one that is older. The log has all of it, in other records.
        table = SegmentTable()
        log = recover(directory, table, segment_blocks, progress=progress, file_system=file_system)
        set_all_aside(file_system, directory)
        found = found._replace(usable=[], refused=[*found.refused, str(error)])
    return RecoveredStore(log, table, found)


def find_snapshots(file_system: FileSystem, directory: Path, layout: str) -> FoundSnapshots:
    """Look at the manifests, newest first, until one can be used. Waits for the disk.

    Raises StorageError for a manifest of a newer format.
    """
    usable: list[Snapshot] = []
    refused: list[str] = []
    manifests = manifest_files(file_system, directory)
    older = False
    for number, path in manifests.items():
        if usable:
            older = True  # it is looked at when this one turns out to be damaged
            break
        try:
            manifest = decode(file_system.read(path), number, path)
            if manifest.layout != layout:
                refused.append(f"{path.name} was made with other settings: {manifest.layout}")
                continue
            files = tuple(RunFile(directory, entry) for entry in manifest.runs)
        except (CorruptRecordError, OSError) as error:
            refused.append(str(error))
            continue
        usable.append(Snapshot(manifest, files))
    numbers = snapshot_numbers(file_system, directory)
    return FoundSnapshots(usable, refused, 1 + max(numbers, default=0), older)
