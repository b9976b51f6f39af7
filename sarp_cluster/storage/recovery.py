"""Recovery: from the log files of a store to its segment table, namespaces and workers (steps: docs/formats.md).

Whatever was acknowledged is below the LSN through which the log was durable, and each group of records vouches for what
was durable when it was written. The log ends with its last whole group. Where what follows is incomplete or does not
verify there are two cases. Nothing behind it vouches for it: it is a tail that was never acknowledged, torn by a crash,
and is cut off. Something does: acknowledged records are damaged, and the store refuses to open, naming the file and the
offset.

With a snapshot only the log behind it is replayed, into a table that is not loaded. Without, all of it.

Recovery only ever shortens: it may be cut off itself and done again, with the same result.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import BadRequestError, CorruptRecordError, SnapshotDamagedError, StorageError
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.storage.log_replay import LogReplay, highest_mark, live_bytes, lost_places
from sarp_cluster.storage.log_scan import scan
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.registry import NamespaceRecord, WorkerRecord, replay_registry
from sarp_cluster.storage.store_directory import cut_file_name, log_file_name, log_files

FORMAT_MAGIC: Final = b"SARPLOG"
FORMAT_VERSION: Final = 3
FRAME_BYTES: Final = 32
HEADER_BYTES: Final = (4_096, FRAME_BYTES + 16 + 2 * 0xFFFF)
"""How much of a file is read for its header: nearly always enough, and certainly."""

PIECE_BYTES: Final = 1_048_576
"""How much of a file is read at once. No record is longer than half of it."""

Progress = Callable[[int, int], object]
"""Told (bytes done, bytes in all)."""


class LogStart(NamedTuple):
    """Where the log goes on behind a snapshot, and what the snapshot has of what the log tells."""

    file: int
    offset: int
    lsn: int
    """Of the last record that is in the snapshot."""
    live_bytes: int
    namespaces: Sequence[NamespaceRecord]
    workers: Sequence[WorkerRecord]
    files: Set[int] | None = None
    """The log files there were. None: the snapshot does not say; then the log is asked, which may take its time."""


class RecoveredLog(NamedTuple):
    """What the log files of a store say, beside the segments in the table."""

    files: dict[int, Path]
    lsn: int
    position: tuple[int, int]
    """(file, offset) behind the last record."""
    disk_bytes: int
    live_bytes: int
    replayed_bytes: int
    namespaces: list[NamespaceRecord]
    workers: list[WorkerRecord]
    routing: list[bytes]
    """Behind a snapshot: payloads of routing records, for RoutingDirectory.apply_journal."""
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
    if version not in (b"1", b"2", str(FORMAT_VERSION).encode()):
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


def older_files(header: bytes, number: int) -> set[int]:
    """The older files that there were when file `number`, with this header, began."""
    if header[: len(FORMAT_MAGIC) + 1] == FORMAT_MAGIC + b"1":
        return set(range(1, number))
    (count,) = struct.unpack_from("<I", header, 12)
    return set(struct.unpack_from(f"<{count}H", header, 16))


def file_header(path: Path, number: int, file_system: FileSystem = DISK) -> tuple[int, bytes] | None:
    """(LSN, payload) of the header of a log file, or None if it does not verify."""
    for length in HEADER_BYTES:
        data = file_system.read(path, 0, length)
        frame = read_frame(data, 0, number, 0)
        if frame is not None and frame.type == RecordType.FILE_HEADER:
            return frame.lsn, data[FRAME_BYTES : FRAME_BYTES + frame.payload_bytes]
        if len(data) < length:
            break
    return None


def lost_files(files: dict[int, Path], file_system: FileSystem = DISK) -> set[int]:
    """The numbers of files that must be there and are not.

    There must be all that the newest header names, but for those that a later record says are reclaimed.
    """
    missing = set(range(1, max(files, default=0))) - files.keys()
    if not missing:
        return missing
    for number in sorted(files, reverse=True):
        header = file_header(files[number], number, file_system)
        if header is not None:
            missing &= older_files(header[1], number)
            for later in [one for one in files if missing and one >= number]:
                records = scan(file_system.read(files[later]), later, 0, True).others
                missing -= {about for kind, about in records if kind == RecordType.RECLAIMED}
            return missing
    return missing


class _Recovery:
    """One recovery of one store."""

    def __init__(
        self, directory: Path, table: SegmentTable, segment_blocks: int, start: LogStart | None, file_system: FileSystem
    ) -> None:
        self._directory = directory
        self._file_system = file_system
        self._table = table
        self._segment_blocks = segment_blocks
        self._start = start
        self._all = log_files(directory, file_system)
        # What is older than a snapshot was durable when that was published.
        begin = 0 if start is None else start.file
        self._files = {number: path for number, path in self._all.items() if number >= begin}
        if start is None:
            self._replay = LogReplay(table)
        else:
            self._replay = LogReplay(table, lsn=start.lsn, file=start.file, offset=start.offset, tail=True)
        if start is None or start.files is None:
            self._lost = lost_files(self._all, file_system)
        else:
            self._lost = (start.files | set(range(start.file, max(self._all, default=0)))) - self._all.keys()
        self._replayed_bytes = 0
        self._lost_places: dict[tuple[int, int], int] | None = None
        """Records that need not be read, (file, offset): place; None: nobody has asked yet."""
        self._skipped: set[int] = set()
        """Their places, of those that do not verify."""

    def run(self, progress: Progress | None, *, cut: bool) -> RecoveredLog:
        """Replay, and take away what was never acknowledged or is not needed."""
        replay = self._replay
        broken = self._replay_files(progress)
        described = None
        if broken is not None:
            self._refuse_damage(broken)
            file, offset = replay.applied_file, replay.applied_offset
            described = f"{log_file_name(file)} from offset {offset} on" if file else "all of the log"
            described += f": records after LSN {replay.applied_lsn}, never acknowledged"
        self._check_sense()
        if cut:
            if broken is not None:
                self._cut(replay.applied_file, replay.applied_offset)
            _make_durable(self._file_system, self._directory, self._files.values())
            self._remove(self._reclaimed & self._all.keys())
        return self._recovered(described)

    def _replay_files(self, progress: Progress | None) -> tuple[int, int] | None:
        """Replay one file after the other. Where that ends early: (file, offset)."""
        replay, start = self._replay, self._start
        sizes = {number: self._file_system.size(path) for number, path in self._files.items()}
        begin = start.offset if start is not None else 0
        total, previous = sum(sizes.values()) - begin, start.file - 1 if start is not None else 0
        if start is not None:
            if sizes.get(start.file, -1) < start.offset:
                raise CorruptRecordError(f"{self._directory / log_file_name(start.file)} ends before the snapshot does")
            # A tail is short: the disk reads all of it while the first of it is replayed.
            for number, path in self._files.items():
                self._file_system.will_read(path, begin if number == start.file else 0)
        for number, path in self._files.items():
            between = set(range(previous + 1, number))
            if between & self._lost:
                return min(between & self._lost), 0
            header = file_header(path, number, self._file_system)
            if header is not None:
                check_header(header[1], path, self._segment_blocks)
                if between and header[0] > replay.lsn:
                    replay.resume(header[0] - 1, reclaimed=True)
            for ended in self._replay_file(number, path, begin, sizes[number]):
                self._replayed_bytes += ended - begin
                begin = ended
                if progress is not None:
                    progress(self._replayed_bytes, total)
            if begin < sizes[number] or begin == 0:
                return number, begin
            previous, begin = number, 0
        return (previous + 1, 0) if replay.staged_records else None

    def _replay_file(self, number: int, path: Path, begin: int, size: int) -> Iterator[int]:
        """Replay a file in pieces that stay in the processor's cache. Yields how far it has come."""
        while begin < size:
            data = self._file_system.read(path, begin, PIECE_BYTES)
            ended = self._replay.feed(data, number, begin, begin)
            if ended == begin and begin + len(data) < size:  # one that is longer, or does not verify
                ended = self._replay.feed(self._file_system.read(path, begin), number, begin, begin)
            if ended == begin:
                ended += self._skip_lost(number, path, begin)
            if ended == begin:
                return
            yield ended
            begin = ended

    def _skip_lost(self, number: int, path: Path, offset: int) -> int:
        """Go on behind a record that does not verify and need not be read. Returns its length; 0: it is none.

        Raises SnapshotDamagedError behind a snapshot: there, what it changed would have to be known.
        """
        if self._lost_places is None:
            self._lost_places = lost_records(self._files, number, self._file_system)
        place = self._lost_places.get((number, offset), 0)
        if not place or read_frame(self._file_system.read(path, offset, place_bytes(place)), 0, number, offset):
            return 0
        if self._start is not None:
            raise SnapshotDamagedError(f"{path}: the record at offset {offset}, behind the snapshot, is lost")
        self._replay.skip()
        self._skipped.add(place)
        return place_bytes(place)

    @property
    def _reclaimed(self) -> set[int]:
        records = self._replay.others
        return {int.from_bytes(about[:4], "little") for kind, about in records if kind == RecordType.RECLAIMED}

    def _refuse_damage(self, broken: tuple[int, int]) -> None:
        """Raise CorruptRecordError if something behind the record that does not verify vouches for it."""
        replay, (number, offset) = self._replay, broken
        vouched = vouched_behind(self._files, number, offset, self._file_system)
        if vouched <= replay.applied_lsn:
            return
        path = self._directory / log_file_name(number)
        if number in self._lost:
            raise CorruptRecordError(f"{path} is missing, and records through LSN {vouched} were durable")
        raise CorruptRecordError(
            f"{path}: the record at offset {offset} (LSN {replay.lsn + 1}) does not verify, and records through LSN "
            f"{vouched} were durable: this is damage, not a torn tail"
        )

    def _check_sense(self) -> None:
        """Raise CorruptRecordError where whole groups say what cannot be, or files are gone from before a snapshot."""
        for file, offset, lsn in self._replay.senseless:
            raise CorruptRecordError(
                f"{self._directory / log_file_name(file)}: the record at offset {offset} (LSN {lsn}) verifies but "
                f"makes no sense: what it changes is not there, or not as it says"
            )
        told = {int.from_bytes(about[:8], "little") for kind, about in self._replay.others if kind == RecordType.LOST}
        for place in sorted(self._skipped - told):
            path = self._directory / log_file_name(place >> 48)
            raise CorruptRecordError(f"{path}: the record at offset {place_offset(place)} does not verify")
        for slot in self._replay.missing_images():
            raise CorruptRecordError(f"{self._directory}: segment {slot} has changes, but its image is not in the log")
        for number in sorted(number for number in self._lost - self._reclaimed if number < min(self._files, default=0)):
            raise CorruptRecordError(f"{self._directory / log_file_name(number)} is missing")

    def _cut(self, number: int, offset: int) -> None:
        """Take a torn tail out of the log, the last file first, so that being cut off here leaves a shorter tail.

        What is cut is kept aside under another name: should it have been damage after all, it can still be looked at.
        """
        for later in sorted((later for later in self._files if later > number), reverse=True):
            self._file_system.rename(self._files.pop(later), self._directory / cut_file_name(later, 0))
            del self._all[later]
        path = self._files.get(number)
        tail = self._file_system.read(path, offset) if path is not None else b""
        if path is not None and tail:
            self._set_aside(self._directory / cut_file_name(number, offset), tail)
            self._file_system.sync_directory(self._directory)  # what is cut is aside before it is gone from the log
            self._file_system.truncate(path, offset)
        self._file_system.sync_directory(self._directory)

    def _set_aside(self, path: Path, tail: bytes) -> None:
        """Keep a tail in a file of its own, unless there is no space: a full disk is what often tears a tail."""
        file_system = self._file_system
        try:
            descriptor = file_system.create(path, replace=True)
            try:
                file_system.write(descriptor, tail, 0)
                file_system.sync(descriptor)
            finally:
                file_system.close(descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if file_system.exists(path):
                file_system.unlink(path)

    def _remove(self, reclaimed: Iterable[int]) -> None:
        """Delete files of which it is durable that nothing of them is needed."""
        for number in reclaimed:
            self._file_system.unlink(self._all.pop(number))
            self._files.pop(number, None)
        if reclaimed:
            self._file_system.sync_directory(self._directory)

    def _recovered(self, cut: str | None) -> RecoveredLog:
        replay, start, table = self._replay, self._start, self._table
        if start is None:
            table.finish_restore()
            live = live_bytes(table)
        else:
            table.finish_replay()
            places = np.asarray(table.take_replaced(), np.uint64)
            replaced = int((places >> np.uint64(32) & np.uint64(0xFFFF)).sum()) << 3
            live = start.live_bytes + replay.segment_bytes - replaced
        try:
            namespaces, workers = replay_registry(
                replay.others,
                start.namespaces if start is not None else (),
                start.workers if start is not None else (),
                gaps=replay.gaps,
            )
        except (struct.error, ValueError, KeyError) as error:
            what = f"a namespace or worker record makes no sense: {error!r}"
            raise CorruptRecordError(f"{self._directory}: {what}") from error
        return RecoveredLog(
            files=self._all,
            lsn=replay.applied_lsn,
            position=(replay.applied_file, replay.applied_offset),
            disk_bytes=sum(self._file_system.size(path) for path in self._all.values()),
            live_bytes=live,
            replayed_bytes=self._replayed_bytes,
            namespaces=namespaces,
            workers=workers,
            routing=replay.routing,
            cut=cut,
        )


def recover(
    directory: Path,
    table: SegmentTable,
    segment_blocks: int,
    *,
    start: LogStart | None = None,
    progress: Progress | None = None,
    cut: bool = True,
    file_system: FileSystem = DISK,
) -> RecoveredLog:
    """Replay the log files of a locked store into an empty `table`, or into one that has begun lazily, from `start` on.

    With `cut` a torn tail is removed and the rest made durable, otherwise it is only found. Raises CorruptRecordError
    for damage. Waits for the disk: call it in a helper thread.
    """
    return _Recovery(directory, table, segment_blocks, start, file_system).run(progress, cut=cut)


def vouched_behind(files: dict[int, Path], number: int, offset: int, file_system: FileSystem = DISK) -> int:
    """The highest LSN that anything behind an offset of a log file says was durable; 0: nothing does."""
    vouched = 0
    for later, path in files.items():
        if later >= number:
            begin = offset if later == number else 0
            vouched = max(vouched, highest_mark(file_system.read(path, begin), begin, later))
    return vouched


def lost_records(files: dict[int, Path], number: int, file_system: FileSystem = DISK) -> dict[tuple[int, int], int]:
    """What log files from this one on say need not be read, (file, offset): place."""
    found = [lost_places(file_system.read(path), later) for later, path in files.items() if later >= number]
    return {(place >> 48, place_offset(place)): place for places in found for place in places}


def place_offset(place: int) -> int:
    """Where in its file a record stands."""
    return (place & 0xFFFFFFFF) << 3


def place_bytes(place: int) -> int:
    """How long it is."""
    return (place >> 32 & 0xFFFF) << 3


def _make_durable(file_system: FileSystem, directory: Path, files: Iterable[Path]) -> None:
    """Sync what was replayed: a process that was killed may have left it in the page cache alone.

    Whatever is done from here on builds on it: a repeated insert is answered as durable without another write, and the
    next group vouches for all before it.
    """
    for path in files:
        descriptor = file_system.open_to_read(path)
        try:
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
    file_system.sync_directory(directory)
