"""Looking over a store that nobody has open: every record of every log file, and every segment they make up.

Changes nothing. What it finds is exact: which file, at which offset, what is wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.matching import Search
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.routing_points import RoutingPoints
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, InvariantViolationError, SarpError, StorageError
from sarp_cluster.storage.log_replay import next_record, replay
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.recovery import check_header, file_header, header_segment_blocks, vouched_behind
from sarp_cluster.storage.store_directory import lock, log_files

SEGMENTS_A_READ: Final = 1_024
FRAME_BYTES: Final = 32
HEADER_BYTES_MAX: Final = 4_096
READ: Final = 1


class Finding(NamedTuple):
    """Something that is not as it should be."""

    file: str
    offset: int
    what: str
    harmless: bool = False
    """True for a torn tail: it was never acknowledged, and the next opening cuts it off."""


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
        """Is there nothing wrong, but for a tail that was never acknowledged?"""
        return all(finding.harmless for finding in self.findings)


def verify(directory: Path) -> Verification:
    """Look over the store in `directory`. Raises StorageError when a process has it open or it is no store."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such store")
    descriptor = lock(directory)
    try:
        return _verify_locked(directory)
    finally:
        os.close(descriptor)


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


def _verify_locked(directory: Path) -> Verification:
    found = Verification()
    table = SegmentTable()
    files = log_files(directory)
    segment_blocks = 0
    lsn = 0
    for number, path in files.items():
        data = path.read_bytes()
        found.files += 1
        found.bytes += len(data)
        others: list[tuple[int, bytes]] = []
        at = 0
        while True:
            at, lsn = replay(table, data, number, lsn, others, at)
            if at == len(data):
                break
            at, lsn = _explain(found, files, (number, at), data, lsn)
        for kind, payload in others:
            if kind == RecordType.FILE_HEADER:
                segment_blocks = segment_blocks or header_segment_blocks(payload, path)
                check_header(payload, path, segment_blocks)
    found.last_lsn = lsn
    if segment_blocks and found.clean:
        _verify_segments(found, table, files, segment_blocks)
    return found


def _explain(
    found: Verification, files: dict[int, Path], at: tuple[int, int], data: bytes, lsn: int
) -> tuple[int, int]:
    """Note what is wrong at (file, offset). Returns the offset at which to go on, and the LSN to go on from."""
    number, offset = at
    name = files[number].name
    resumed, next_lsn = next_record(data, offset, number)
    if resumed == offset:
        what = (
            "a record verifies but makes no sense here: what it changes is missing"
            if next_lsn == lsn + 1
            else f"LSN {next_lsn} follows LSN {lsn}: records are missing"
        )
        found.findings.append(Finding(name, offset, what))
        return (_behind(data, offset, number), next_lsn) if next_lsn == lsn + 1 else (offset, next_lsn - 1)
    vouched = vouched_behind(files, number, data, offset)
    if vouched > lsn:
        what = f"{resumed - offset} bytes do not verify, although records through LSN {vouched} were durable"
        found.findings.append(Finding(name, offset, what))
    else:
        what = f"{resumed - offset} bytes of a tail that was never acknowledged"
        found.findings.append(Finding(name, offset, what, harmless=True))
    return resumed, max(lsn, next_lsn - 1)


def _behind(data: bytes, at: int, number: int) -> int:
    """The offset of the next record behind the one at `at`."""
    return next_record(data, at + 8, number)[0]


def _verify_segments(found: Verification, table: SegmentTable, files: dict[int, Path], segment_blocks: int) -> None:
    """Read every segment, check that its records agree, and that the segments hang together."""
    try:
        table.finish_restore()
        table.validate(segment_blocks)
    except SarpError as error:
        found.findings.append(Finding("", 0, str(error)))
        return
    parameters = SarpParameters(IndexConfig(segment_blocks=segment_blocks))
    directory = RoutingDirectory(parameters)
    search = Search(parameters, directory, RoutingPoints(parameters, directory), table)
    next_file = 1 + max(files)
    tail = LogTail(1 << 28, next_file, next_file, found.last_lsn, file_header(segment_blocks))
    descriptors = [(number, os.open(path, os.O_RDONLY | os.O_CLOEXEC)) for number, path in files.items()]
    try:
        for number, descriptor in descriptors:
            tail.set_descriptor(number, descriptor)
        for slots in table.slots_in_use(SEGMENTS_A_READ):
            search.load_segments(slots)
            tail.read_wait(search.batch)
            for segment in search.batch.describe():
                if segment["state"] != READ:
                    place = segment["delta"] or segment["image"]
                    what = f"segment {segment['slot']}: image and delta do not agree with each other or the table"
                    found.findings.append(Finding(files[place >> 48].name, (place & 0xFFFFFFFF) << 3, what))
    except InvariantViolationError as error:
        found.findings.append(Finding("", 0, str(error)))
    finally:
        for _, descriptor in descriptors:
            os.close(descriptor)
    found.segments, found.blocks = table.segments, table.blocks
