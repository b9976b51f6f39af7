"""Looking over the snapshots of a store: every manifest, and every chunk of the runs that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sarp_cluster.errors import CorruptRecordError
from sarp_cluster.storage.file_system import DISK
from sarp_cluster.storage.manifest import decode, manifest_files
from sarp_cluster.storage.run_file import RunEntry, RunFile, run_file_name


def bad_snapshots(directory: Path) -> Iterator[tuple[str, int, str]]:
    """(file, offset, what is wrong) of the snapshots in a locked store. Raises StorageError for a newer format."""
    looked_at: set[RunEntry] = set()
    for number, path in manifest_files(DISK, directory).items():
        try:
            manifest = decode(DISK.read(path), number, path)
        except (CorruptRecordError, OSError) as error:
            yield path.name, _offset(error), str(error)
            continue
        for entry in manifest.runs:
            if entry not in looked_at:
                looked_at.add(entry)
                yield from _bad_run(directory, entry)


def _bad_run(directory: Path, entry: RunEntry) -> Iterator[tuple[str, int, str]]:
    name = run_file_name(entry.number)
    try:
        file = RunFile(directory, entry)
    except (CorruptRecordError, OSError) as error:
        yield name, _offset(error), str(error)
        return
    for what in file.verify():
        yield name, _offset(what), what


def _offset(what: object) -> int:
    """The offset that a message names; 0 if it names none."""
    match = re.search(r"offset (\d+)", str(what))
    return int(match[1]) if match else 0
