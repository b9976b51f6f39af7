"""Finding the snapshot to recover from (docs/formats.md, Recovery).

The newest manifest that verifies, and whose runs do, as far as their indexes: the rest of a run is verified chunk by chunk
when it is first wanted. If that one is damaged the one before is taken, with more of the log to replay; if none is left,
everything is rebuilt from the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sarp_cluster.errors import CorruptRecordError
from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.manifest import Manifest, decode, manifest_files
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
    """Newest first."""
    refused: list[str]
    """Why the others cannot be used, for people."""
    next_number: int
    """For the next run or manifest: none that was used before."""


def find_snapshots(file_system: FileSystem, directory: Path, layout: str) -> FoundSnapshots:
    """Look at all manifests. Waits for the disk. Raises StorageError for a manifest of a newer format."""
    usable: list[Snapshot] = []
    refused: list[str] = []
    manifests = manifest_files(file_system, directory)
    for number, path in manifests.items():
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
    return FoundSnapshots(usable, refused, 1 + max(numbers, default=0))
