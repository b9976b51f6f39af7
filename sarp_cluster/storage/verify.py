"""Looking over a store that nobody has open: every record of every log file, and every segment they make up.

Changes nothing. What it finds is exact: which file, at which offset, what is wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.matching import Search
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.routing_points import RoutingPoints
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, StorageError
from sarp_cluster.storage.log_replay import LogReplay, next_record
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.recovery import (
    Progress,
    check_header,
    file_header,
    header_prefix,
    header_segment_blocks,
    lost_files,
    lost_records,
    place_bytes,
    vouched_behind,
)
from sarp_cluster.storage.store_directory import lock, log_file_name, log_files
from sarp_cluster.storage.verify_rows import bad_rows
from sarp_cluster.storage.verify_snapshots import bad_snapshots

SEGMENTS_A_READ: Final = 1_024
FRAME_BYTES: Final = 32
HEADER_BYTES_MAX: Final = 4_096
BLOCKS_A_POINT_MIN: Final = 2
READ: Final = 1


class Finding(NamedTuple):
    """Something that is not as it should be."""

    file: str
    offset: int
    what: str
    harmless: bool = False
    """True for a torn tail: it was never acknowledged, and the next opening cuts it off. True, too, for a record that
    could not be read and is not needed any more."""


@dataclass
class Verification:
    """What a store has, and what is wrong with it."""

    files: int = 0
    bytes: int = 0
    last_lsn: int = 0
    segments: int = 0
    blocks: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Is there nothing wrong, but for what is harmless?"""
        return all(finding.harmless for finding in self.findings)


def verify(directory: Path, progress: Progress | None = None) -> Verification:
    """Look over the store in `directory`. Raises StorageError when a process has it open or it is no store.

    `progress` is told (bytes done, bytes in all); each byte counts twice: once as a record, once as part of a segment.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such store")
    descriptor = lock(directory)
    try:
        return _Verifier(directory, progress).run()
    finally:
        os.close(descriptor)


def config_for(segment_blocks: int) -> IndexConfig:
    """Settings with which a store of such segments can be looked at, whatever those are with which it is used."""
    return IndexConfig(
        segment_blocks=segment_blocks, base_points=min(IndexConfig().base_points, segment_blocks // BLOCKS_A_POINT_MIN)
    )


def store_segment_blocks(directory: Path) -> int:
    """Blocks a segment of the store in `directory`, from the header of its first log file. Opens nothing else.

    Raises FileNotFoundError without a directory, StorageError for one without a log that this program reads.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such store")
    for number, path in log_files(directory).items():
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES_MAX)
        header = read_frame(start, 0, number, 0)
        if header is None or header.type != RecordType.FILE_HEADER:
            raise CorruptRecordError(f"{path}: the record at offset 0 is no file header that verifies")
        blocks = header_segment_blocks(start[FRAME_BYTES:], path)
        check_header(start[FRAME_BYTES:], path, blocks)
        return blocks
    raise StorageError(f"{directory} is no store: it has no log file in it")


class _Verifier:
    """One look over one store."""

    def __init__(self, directory: Path, progress: Progress | None) -> None:
        self._directory = directory
        self._files = log_files(directory)
        self._progress = progress
        self._bytes = sum(path.stat().st_size for path in self._files.values())
        self._table = SegmentTable()
        self._namespaces: set[int] = set()
        self._workers: set[int] = set()
        self._found = Verification()

    def run(self) -> Verification:
        """Records first; segments only where all of them are there."""
        segment_blocks = self._records()
        if segment_blocks and self._found.clean:
            self._segments(segment_blocks)
        self._found.findings.extend(Finding(*found) for found in bad_snapshots(self._directory))
        return self._found

    def _tell(self, done: float) -> None:
        if self._progress is not None:
            self._progress(int(done), 2 * self._bytes)

    def _at(self, place: int, what: str) -> None:
        """Note what is wrong with the segment whose record stands at a place."""
        self._found.findings.append(Finding(self._files[place >> 48].name, (place & 0xFFFFFFFF) << 3, what))

    # --- records ------------------------------------------------------------------------------------------------------

    def _records(self) -> int:
        """Look at every record of every file. Returns how many blocks a segment has; 0: there is none."""
        found, segment_blocks, torn, previous = self._found, 0, False, 0
        replay = LogReplay(self._table)
        lost = lost_files(self._files)
        for number, path in self._files.items():
            data = path.read_bytes()
            found.files += 1
            found.bytes += len(data)
            header = None if torn else file_header(path, number)
            if header is not None:
                segment_blocks = segment_blocks or header_segment_blocks(header[1], path)
                check_header(header[1], path, segment_blocks)
                if number > previous + 1:
                    torn = self._missing(replay, lost.intersection(range(previous + 1, number)))
                    replay.resume(max(replay.lsn, header[0] - 1), reclaimed=True)
            at = 0
            while not torn and (at := replay.feed(data, number, at)) < len(data):
                at, torn = self._explain(replay, number, at, data)
            previous = number
            self._tell(found.bytes)
        if replay.staged_records and not torn:
            self._torn(replay)
        self._take_over(replay)
        return segment_blocks

    def _missing(self, replay: LogReplay, lost: set[int]) -> bool:
        """Note files that must be there and are not. Returns whether the log ends before them instead."""
        if lost and vouched_behind(self._files, min(lost), 0) <= replay.applied_lsn:
            self._torn(replay)
            return True
        self._found.findings += [Finding(log_file_name(number), 0, "is missing") for number in sorted(lost)]
        return False

    def _torn(self, replay: LogReplay) -> None:
        """Note a tail that was never acknowledged: all behind the last whole group."""
        first = replay.applied_file or min(self._files)
        tail = sum(path.stat().st_size for number, path in self._files.items() if number >= first)
        what = f"{tail - replay.applied_offset} bytes of a tail that was never acknowledged"
        self._found.findings.append(Finding(log_file_name(first), replay.applied_offset, what, harmless=True))

    def _take_over(self, replay: LogReplay) -> None:
        """Note what the records say, and which of them make no sense."""
        for file, offset, _ in replay.senseless:
            what = "a record verifies but makes no sense here: what it changes is missing"
            self._found.findings.append(Finding(log_file_name(file), offset, what))
        for slot in replay.missing_images():
            self._found.findings.append(Finding("", 0, f"segment {slot} has changes, but its image is not in the log"))
        for kind, payload in replay.others:
            if kind == RecordType.NAMESPACE:
                self._namespaces.add(int.from_bytes(payload[:4], "little"))
            elif kind == RecordType.WORKER:
                self._workers.add(int.from_bytes(payload[:4], "little"))
        self._found.last_lsn = replay.lsn if self._found.findings else replay.applied_lsn

    def _explain(self, replay: LogReplay, number: int, offset: int, data: bytes) -> tuple[int, bool]:
        """Note what is wrong at an offset of a file. Returns where to go on, and whether the log ends here instead."""
        name, lsn = self._files[number].name, replay.lsn
        resumed, next_lsn = next_record(data, offset, number)
        place = lost_records(self._files, number).get((number, offset), 0)
        if place and resumed != offset:
            what = "a record of a segment does not verify: that is gone, or was written anew"
            self._found.findings.append(Finding(name, offset, what, harmless=True))
            replay.skip()
            return offset + place_bytes(place), False
        vouched = vouched_behind(self._files, number, offset)
        if vouched <= replay.applied_lsn:
            self._torn(replay)  # what is behind it is no part of the store
            return offset, True
        what = f"{resumed - offset} bytes do not verify, although records through LSN {vouched} were durable"
        if resumed == offset:
            what = f"LSN {next_lsn} follows LSN {lsn}: records are missing"
        self._found.findings.append(Finding(name, offset, what))
        replay.resume(next_lsn - 1 if resumed == offset else max(lsn, next_lsn - 1))
        return resumed, False

    # --- segments -----------------------------------------------------------------------------------------------------

    def _segments(self, segment_blocks: int) -> None:
        """Do the segments hang together, and do the records of each agree?"""
        for slot, what in bad_rows(self._table, segment_blocks):
            self._at((self._table.describe(slot) or {})["image"], f"segment {slot}: {what}")
        if not self._found.clean:
            return  # what they refer to cannot be followed
        self._table.finish_restore()
        self._read(segment_blocks)
        self._found.segments, self._found.blocks = self._table.segments, self._table.blocks

    def _read(self, segment_blocks: int) -> None:
        """Read every segment."""
        parameters = SarpParameters(config_for(segment_blocks))
        directory = RoutingDirectory(parameters)
        search = Search(parameters, directory, RoutingPoints(parameters, directory), self._table)
        next_file = 1 + max(self._files)
        tail = LogTail(1 << 28, next_file, next_file, self._found.last_lsn, header_prefix(segment_blocks))
        descriptors = [(number, os.open(path, os.O_RDONLY | os.O_CLOEXEC)) for number, path in self._files.items()]
        done = 0
        try:
            for number, descriptor in descriptors:
                tail.set_descriptor(number, descriptor)
            for slots in self._table.slots_in_use(SEGMENTS_A_READ):
                search.load_segments(slots)
                tail.read_wait(search.batch)
                for segment in search.batch.describe():
                    self._check(segment)
                done += len(slots)
                self._tell(self._bytes * (1 + done / self._table.segments))
        finally:
            for _, descriptor in descriptors:
                os.close(descriptor)

    def _check(self, segment: dict[str, Any]) -> None:
        """Do a segment's records agree with one another and with what the log has beside them?"""
        what = None
        if segment["state"] != READ:
            what = "image and delta do not agree with each other or the table"
        elif segment["namespace"] not in self._namespaces:
            what = f"namespace {segment['namespace']} is not in the log"
        else:
            home = (1 << segment["count"]) - (1 << segment["fork"])
            for run in segment["runs"]:
                if run["worker"] not in self._workers:
                    what = f"worker {run['worker']} is not in the log"
                elif run["mask"] & ~home:
                    what = f"worker {run['worker']} holds blocks that are at home elsewhere"
        if what is not None:
            self._at(segment["delta"] or segment["image"], f"segment {segment['slot']}: {what}")
