"""Recovery: from the log files of a store to its segment table, namespaces and workers (steps: docs/formats.md).

Whatever was acknowledged is below the LSN through which the log was durable, and each group of records vouches for what
was durable when it was written. So where a record does not verify there are two cases. Nothing behind it vouches for
it: it is a tail that was never acknowledged, torn by a crash, and is cut off. Something does: acknowledged records are
damaged, and the store refuses to open, naming the file and the offset.

Recovery only ever shortens: it may be cut off itself and done again, with the same result.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import BadRequestError, CorruptRecordError, StorageError
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.storage.log_replay import highest_mark, live_bytes, replay
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.registry import NamespaceRecord, WorkerRecord, replay_registry
from sarp_cluster.storage.store_directory import cut_file_name, log_file_name, log_files

FORMAT_MAGIC: Final = b"SARPLOG"
FORMAT_VERSION: Final = 2
RECLAIMED: Final = 9

Progress = Callable[[int, int], object]
"""Told (bytes done, bytes in all)."""


class RecoveredLog(NamedTuple):
    """What the log files of a store say, beside the segments in the table."""

    files: dict[int, Path]
    lsn: int
    disk_bytes: int
    live_bytes: int
    namespaces: list[NamespaceRecord]
    workers: list[WorkerRecord]
    cut: str | None
    """Which tail was cut off, for people."""


def header_prefix(segment_blocks: int) -> bytes:
    """Of the payload of a log file's header record what is the same in all files."""
    return FORMAT_MAGIC + str(FORMAT_VERSION).encode() + struct.pack("<I", segment_blocks)


def check_header(payload: bytes, path: Path, segment_blocks: int) -> None:
    """Raise unless this version reads the file and its segments are of the size that is asked for."""
    if not payload.startswith(FORMAT_MAGIC):
        raise StorageError(f"{path}: not a log file of ours")
    version = payload[len(FORMAT_MAGIC) : len(FORMAT_MAGIC) + 1]
    if version not in (b"1", str(FORMAT_VERSION).encode()):
        raise StorageError(
            f"{path}: format version {version.decode(errors='replace')}, this program reads version {FORMAT_VERSION}: "
            f"open it with a newer program"
        )
    blocks = header_segment_blocks(payload, path)
    if blocks != segment_blocks:
        raise BadRequestError(
            f"segment_blocks: the store was made with {blocks} blocks a segment, not {segment_blocks}",
            field="segment_blocks",
        )


def header_segment_blocks(payload: bytes, path: Path) -> int:
    """Blocks a segment of the store that a log file belongs to."""
    if len(payload) < len(FORMAT_MAGIC) + 1 + 8:
        raise StorageError(f"{path}: its header is too short")
    (blocks,) = struct.unpack_from("<I", payload, len(FORMAT_MAGIC) + 1)
    return int(blocks)


def _older_files(header: bytes) -> set[int]:
    """The older files that there were when the file with this header began."""
    if header[: len(FORMAT_MAGIC) + 1] != FORMAT_MAGIC + b"2":
        return set()
    (count,) = struct.unpack_from("<I", header, 12)
    return set(struct.unpack_from(f"<{count}H", header, 16))


def recover(
    directory: Path,
    table: SegmentTable,
    segment_blocks: int,
    *,
    progress: Progress | None = None,
    cut: bool = True,
    file_system: FileSystem = DISK,
) -> RecoveredLog:
    """Replay the log files of a locked store into an empty `table`. Waits for the disk: call it in a helper thread.

    With `cut` a torn tail is removed and the rest made durable, otherwise it is only found. Raises CorruptRecordError
    for damage.
    """
    files = log_files(directory, file_system)
    total = sum(file_system.size(path) for path in files.values())
    others: list[tuple[int, bytes]] = []
    lsn = done = 0
    torn: tuple[int, int] | None = None
    newest_header = b""
    missing = set(range(1, max(files, default=0))) - files.keys()
    for number, path in files.items():
        data = file_system.read(path)
        header_at = len(others)
        if number - 1 not in files and (header := read_frame(data, 0, number, 0)) is not None and header.lsn > lsn:
            lsn = header.lsn - 1  # whether what is missing was reclaimed is looked at below
        ended, lsn = replay(table, data, number, lsn, others, gaps=bool(missing))
        done += len(data)
        if len(others) > header_at and others[header_at][0] == RecordType.FILE_HEADER:
            check_header(others[header_at][1], path, segment_blocks)
            newest_header = others[header_at][1]
        if progress is not None:
            progress(done, total)
        if ended < len(data) or ended == 0:
            _refuse_damage(files, number, data, ended, lsn)
            torn = (number, ended)
            break
    described = None
    if torn is not None:
        described = f"{log_file_name(torn[0])} from offset {torn[1]} on: records after LSN {lsn}, never acknowledged"
        if cut:
            _cut(file_system, directory, files, *torn)
    reclaimed = {struct.unpack("<I", payload)[0] for kind, payload in others if kind == RECLAIMED}
    files = {number: path for number, path in files.items() if file_system.exists(path)}
    lost = _older_files(newest_header) - files.keys() - reclaimed
    if lost:
        raise CorruptRecordError(f"{directory}: {log_file_name(min(lost))} is missing")
    if cut:
        for number in reclaimed & files.keys():
            file_system.unlink(files.pop(number))
        _make_durable(file_system, directory, files)
    table.finish_restore()
    try:
        namespaces, workers = replay_registry(others, gaps=bool(missing))
    except (struct.error, ValueError, KeyError) as error:
        raise CorruptRecordError(f"{directory}: a namespace or worker record makes no sense: {error!r}") from error
    return RecoveredLog(
        files=files,
        lsn=lsn,
        disk_bytes=sum(file_system.size(path) for path in files.values()),
        live_bytes=live_bytes(table),
        namespaces=namespaces,
        workers=workers,
        cut=described,
    )


def vouched_behind(files: dict[int, Path], number: int, data: bytes, offset: int) -> int:
    """The highest LSN that anything behind an offset of a log file (its `data`) says was durable; 0: nothing does."""
    vouched = highest_mark(data, offset, number)
    for later, path in files.items():
        if later > number:
            vouched = max(vouched, highest_mark(path.read_bytes(), 0, later))
    return vouched


def _refuse_damage(files: dict[int, Path], number: int, data: bytes, ended: int, lsn: int) -> None:
    """Raise CorruptRecordError if something behind the record that does not verify vouches for it."""
    vouched = vouched_behind(files, number, data, ended)
    if vouched > lsn:
        raise CorruptRecordError(
            f"{files[number]}: the record at offset {ended} (LSN {lsn + 1}) does not verify, and records through LSN "
            f"{vouched} were durable: this is damage, not a torn tail"
        )


def _cut(file_system: FileSystem, directory: Path, files: dict[int, Path], number: int, offset: int) -> None:
    """Take a torn tail out of the log, the last file first, so that being cut off here leaves a shorter tail.

    What is cut is kept aside under another name: should it have been damage after all, it can still be looked at.
    """
    for later in sorted((later for later in files if later > number), reverse=True):
        file_system.rename(files[later], directory / cut_file_name(later, 0))
    if offset == 0:
        file_system.rename(files[number], directory / cut_file_name(number, 0))
    else:
        _set_aside(file_system, files[number], offset, directory / cut_file_name(number, offset))
        file_system.sync_directory(directory)  # what is cut is aside before it is gone from the log
        file_system.truncate(files[number], offset)
    file_system.sync_directory(directory)


def _set_aside(file_system: FileSystem, path: Path, offset: int, aside: Path) -> None:
    """Copy a tail to another file, unless there is no space: a full disk is a likely reason for a torn tail."""
    tail = file_system.read(path)[offset:]
    try:
        descriptor = file_system.create(aside, replace=True)
        try:
            file_system.write(descriptor, tail, 0)
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if file_system.exists(aside):
            file_system.unlink(aside)


def _make_durable(file_system: FileSystem, directory: Path, files: dict[int, Path]) -> None:
    """Sync what was replayed: a process that was killed may have left it in the page cache alone.

    Whatever is done from here on builds on it: a repeated insert is answered as durable without another write, and the
    next group vouches for all before it.
    """
    for path in files.values():
        descriptor = file_system.open_to_read(path)
        try:
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
    file_system.sync_directory(directory)
