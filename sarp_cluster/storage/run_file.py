"""Run files: sorted changes of an index at rest, postings and rows, in chunks that are loaded one by one.

A run file (docs/formats.md) is written once and never changed: chunks of 64 KiB, each with its checksum in the index at
the file's end, so that any chunk can be read and verified alone. Chunks are read with pread into memory of their own,
never mapped: a file that fails or is cut short is an error here, not the end of the process.
"""

from __future__ import annotations

import errno
import os
import struct
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import sleep
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarp_cluster import limits
from sarp_cluster.core.posting_run import PostingRun
from sarp_cluster.errors import SnapshotDamagedError
from sarp_cluster.storage.checksum import crc32c
from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.run_packing import RowMerge, RunPacker

CHUNK_BYTES: Final = 65_536
ROW_BYTES: Final = 40
CHUNK_ROWS: Final = 1_489
"""Rows a chunk: a column of slots (u32), then one of rows."""
ROWS_AT: Final = 5_960
PAGE_ROWS: Final = 1_024
FIRST_SLOT: Final = 4_096
POSTING_ENTRY_BYTES: Final = 32
ROW_ENTRY: Final = np.dtype([("first", "<u4"), ("count", "<u4")])
FOOTER: Final = struct.Struct("<8sIIII")
FOOTER_MAGIC: Final = b"SARPRUN1"

Slots = NDArray[np.uint32]
Rows = NDArray[np.uint8]


class RunEntry(NamedTuple):
    """What a manifest knows of a run file."""

    number: int
    posting_chunks: int
    row_chunks: int
    index_checksum: int

    @property
    def bytes(self) -> int:
        """Length of the file."""
        return self.index_at + self.index_bytes + FOOTER.size

    @property
    def index_at(self) -> int:
        """Offset of the index."""
        return (self.posting_chunks + self.row_chunks) * CHUNK_BYTES

    @property
    def index_bytes(self) -> int:
        """Length of the index."""
        return self.posting_chunks * (POSTING_ENTRY_BYTES + 4) + self.row_chunks * (ROW_ENTRY.itemsize + 4)


def run_file_name(number: int) -> str:
    """Name of a run file."""
    return f"run-{number:06d}.sarp"


def write_run_file(file_system: FileSystem, directory: Path, run: PostingRun, rows: RowMerge) -> RunEntry:
    """Write and sync a run file under its final name, which no manifest mentions yet. For a helper thread.

    The caller syncs the directory, with all else that a manifest will name.
    """
    path = directory / run_file_name(run.number)
    descriptor = file_system.create(path, replace=True)
    try:
        packer = RunPacker()
        posting_checksums, row_entries, row_checksums = [], [], []
        postings = row_chunks = 0
        while packed := packer.postings(run, postings):
            file_system.write(descriptor, packer.data, postings * CHUNK_BYTES)
            posting_checksums.append(packer.checksums)
            postings += packed
            sleep(limits.MERGE_PAUSE_S)
        while packed := packer.rows(rows):
            file_system.write(descriptor, packer.data, (postings + row_chunks) * CHUNK_BYTES)
            row_entries.append(packer.entries)
            row_checksums.append(packer.checksums)
            row_chunks += packed
            sleep(limits.MERGE_PAUSE_S)
        index = b"".join([run.index(), *posting_checksums, *row_entries, *row_checksums])
        footer = FOOTER.pack(FOOTER_MAGIC, run.number, postings, row_chunks, crc32c(index))
        file_system.write(descriptor, index + footer, (postings + row_chunks) * CHUNK_BYTES)
        file_system.sync(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # What there is of it would keep from the log the space that it needs to end in order.
            file_system.unlink(path)
        raise
    finally:
        file_system.close(descriptor)
    return RunEntry(run.number, postings, row_chunks, crc32c(index + footer))


class RunFile:
    """An open run file. Reading may be done in any thread; the file is closed when nobody has it any more."""

    def __init__(self, directory: Path, entry: RunEntry) -> None:
        """Read and verify the index. Raises SnapshotDamagedError, FileNotFoundError."""
        self.entry = entry
        self.path = directory / run_file_name(entry.number)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        if size != entry.bytes:
            raise SnapshotDamagedError(f"{self.path}: {size} bytes, its manifest says {entry.bytes}", entry.number)
        index = os.pread(self._descriptor, entry.index_bytes + FOOTER.size, entry.index_at)
        if crc32c(index) != entry.index_checksum:
            raise SnapshotDamagedError(
                f"{self.path}: the index at offset {entry.index_at} does not verify", entry.number
            )
        postings, rows = entry.posting_chunks, entry.row_chunks
        at = postings * POSTING_ENTRY_BYTES
        self.posting_index = index[:at]
        self._posting_checksums = np.frombuffer(index, "<u4", postings, at)
        at += 4 * postings
        self._row_entries = np.frombuffer(index, ROW_ENTRY, rows, at)
        at += ROW_ENTRY.itemsize * rows
        self._row_checksums = np.frombuffer(index, "<u4", rows, at)
        self._row_first = np.ascontiguousarray(self._row_entries["first"])

    def _read(self, chunk: int, checksum: int) -> bytes:
        data = os.pread(self._descriptor, CHUNK_BYTES, chunk * CHUNK_BYTES)
        if crc32c(data) != checksum:
            raise self._damage(chunk)
        return data

    def _damage(self, chunk: int) -> SnapshotDamagedError:
        return SnapshotDamagedError(
            f"{self.path}: the chunk at offset {chunk * CHUNK_BYTES} does not verify", self.entry.number
        )

    def will_need(self, chunk: int) -> None:
        """Tell the kernel that a chunk of postings is about to be read."""
        os.posix_fadvise(self._descriptor, chunk * CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)

    def posting_chunk(self, chunk: int) -> bytes:
        """A chunk of postings, verified. Raises SnapshotDamagedError."""
        return self._read(chunk, int(self._posting_checksums[chunk]))

    def row_chunk(self, chunk: int) -> tuple[Slots, Rows]:
        """A chunk of rows, verified: their slots, ascending, and the rows. Raises SnapshotDamagedError."""
        data = self._read(self.entry.posting_chunks + chunk, int(self._row_checksums[chunk]))
        count = int(self._row_entries["count"][chunk])
        slots = np.frombuffer(data, "<u4", count)
        rows = np.frombuffer(data, np.uint8, ROW_BYTES * count, ROWS_AT).reshape(count, ROW_BYTES)
        return slots, rows

    def chunks_of_slots(self, begin: int, end: int) -> range:
        """The chunks that may have rows of the slots [begin, end)."""
        first = max(0, int(np.searchsorted(self._row_first, begin, "right")) - 1)
        return range(first, int(np.searchsorted(self._row_first, end, "left")))

    def will_need_slots(self, begin: int, end: int) -> None:
        """Tell the kernel that the rows of these slots are about to be read."""
        for chunk in self.chunks_of_slots(begin, end):
            self.will_need(self.entry.posting_chunks + chunk)

    def rows_of_slots(self, begin: int, end: int) -> tuple[Slots, Rows]:
        """The rows of the slots [begin, end) that are in this run."""
        found: list[tuple[Slots, Rows]] = []
        for chunk in self.chunks_of_slots(begin, end):
            slots, rows = self.row_chunk(chunk)
            part = slice(int(np.searchsorted(slots, begin)), int(np.searchsorted(slots, end)))
            found.append((slots[part], rows[part]))
        if not found:
            return np.empty(0, np.uint32), np.empty((0, ROW_BYTES), np.uint8)
        return np.concatenate([slots for slots, _ in found]), np.concatenate([rows for _, rows in found])

    def add_rows(self, merge: RowMerge) -> None:
        """Let a merge read all rows, in its own time. It raises SnapshotDamagedError for what does not verify."""
        offset = self.entry.posting_chunks * CHUNK_BYTES
        merge.add_file(self, self._descriptor, offset, self._row_entries.view(np.uint32), self._row_checksums)

    def row_failure(self, chunk: int, error: int) -> Exception:
        """Why a merge could not read a chunk of rows: an errno, or 0 where it does not verify."""
        if error:
            return OSError(error, os.strerror(error), str(self.path))
        return self._damage(self.entry.posting_chunks + chunk)

    def verify(self) -> Iterator[str]:
        """What is wrong with each chunk that does not verify; for `sarp verify` and the scrub."""
        for chunk in range(self.entry.posting_chunks):
            try:
                self.posting_chunk(chunk)
            except (SnapshotDamagedError, OSError) as error:
                yield str(error)
        for chunk in range(self.entry.row_chunks):
            try:
                self.row_chunk(chunk)
            except (SnapshotDamagedError, OSError) as error:
                yield str(error)


def newest_rows(files: Iterable[RunFile], begin: int, end: int) -> tuple[Slots, Rows]:
    """The rows of the slots [begin, end) in any of the runs, newest run first: of each slot the newest."""
    parts = [file.rows_of_slots(begin, end) for file in files]
    slots = np.concatenate([slots for slots, _ in parts]) if parts else np.empty(0, np.uint32)
    if not len(slots):
        return slots, np.empty((0, ROW_BYTES), np.uint8)
    rows = np.concatenate([rows for _, rows in parts])
    unique, first = np.unique(slots, return_index=True)  # of equal ones the first, which is the newest
    return unique, rows[first]
