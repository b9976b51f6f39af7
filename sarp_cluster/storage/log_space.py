"""The log files as what takes space: which there are, what is free beside them, how one is scanned and deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.log_scan import FileScan, scan
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.reclaim import LogFile, ReadEpochs, RecordsInForce, Situation
from sarp_cluster.storage.store_directory import log_file_name

SCAN_BYTES: Final = 1_048_576
"""How much of a file is looked through at once. No record is longer than half of it."""

RESERVE_BYTES_MIN: Final = 65_536
"""With less left on the disk than a log file and this, nothing new is taken: it takes space to make space."""

RESERVE_PARTS: Final = 16
"""But no more than this part of a disk is kept back."""


class LogSpace:
    """The log files of one store, and the disk they are on. Part of a LogStore."""

    def __init__(self, directory: Path, file_system: FileSystem, tail: LogTail, descriptors: dict[int, int]) -> None:
        self._directory = directory
        self._file_system = file_system
        self._tail = tail
        self._descriptors = descriptors
        self.files = tail.files
        self.in_force = RecordsInForce()
        self.reads = ReadEpochs()
        self.free_bytes: int | None = None
        """Left on the disk beyond what is kept back for reclaiming; below 0: of that. None: not known."""
        self.oldest_needed_file: int | None = None
        """Files from this number on are needed by the oldest kept snapshot and not deleted; None: there is none."""

    @property
    def low(self) -> bool:
        """Is there so little left on the disk that only reclaiming may have it?"""
        return self.free_bytes is not None and self.free_bytes < 0

    def look_for_free_bytes(self) -> int | None:
        """What `free_bytes` is now. For a helper thread."""
        try:
            free, total = self._file_system.space(self._directory)
        except OSError:
            return None  # what this is for shows in the write that comes next
        return free - min(self._reserve, total // RESERVE_PARTS) if total else None

    @property
    def _reserve(self) -> int:
        return self._tail.file_bytes_max + RESERVE_BYTES_MIN

    def log_files(self) -> list[LogFile]:
        """The files that are not reclaimed, the open one last. Once their live bytes are counted."""
        return [
            LogFile(
                number,
                self.files.bytes_of(number),
                self.files.header_bytes.get(number, 0),
                self.files.live_in(number) + self.in_force.bytes_in(number),
            )
            for number in sorted(self.files.listed)
        ]

    def situation(self, ratio_max: float, *, pressed: bool) -> Situation:
        """What the choice of a file to reclaim depends on; `pressed`: inserts are refused for lack of space."""
        free_bytes = None if self.free_bytes is None else self.free_bytes + self._reserve
        return Situation(ratio_max, self._tail.file_bytes_max, self.oldest_needed_file, free_bytes, pressed)

    def scan(self, number: int, offset: int) -> FileScan:
        """Look through a stretch of a file that is written. For a helper thread."""
        descriptor, length = self._descriptors[number], self.files.bytes_of(number)
        wanted = min(SCAN_BYTES, length - offset)
        data = bytearray()
        while len(data) < wanted:
            piece = os.pread(descriptor, wanted - len(data), offset + len(data))
            if not piece:
                break
            data += piece
        if len(data) < wanted:  # it has become shorter
            return scan(data, number, offset, True)._replace(damaged=True, end=length)
        return scan(data, number, offset, offset + wanted == length)

    def delete(self, number: int) -> None:
        """Take a file out of the directory, durably. For a helper thread."""
        self._file_system.unlink(self._directory / log_file_name(number))
        self._file_system.sync_directory(self._directory)

    def removed(self, number: int) -> list[int]:
        """A file is deleted. Returns the descriptors that are to be closed."""
        self.files.forget(number)
        self.in_force.forget(number)
        self.reads.retire(number)
        return self.unread()

    def unread(self) -> list[int]:
        """The descriptors of deleted files that no read wants any more; they are the caller's to close."""
        descriptors = []
        for number in self.reads.unread():
            self._tail.set_descriptor(number, -1)
            descriptors.append(self._descriptors.pop(number))  # nothing is written to it: the writer does not look
        return descriptors
