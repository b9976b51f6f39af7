"""The log: our native segment store (design §5). Append-only files of framed records; write-ahead log and store in one.

Files are named log-NNNNN.sarp in the store's directory. Appending happens in memory (log_tail); a writer thread writes
what has gathered, at the latest WRITE_DELAY_MS after the first byte, and syncs when asked to.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from sarp_cluster import limits
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.errors import StorageError
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType
from sarp_cluster.storage.segment_store import StoreStatistics

WRITE_DELAY_MS: Final = 5
"""Appended bytes wait at most so long in memory before they are written to their file."""

Sealed = list[tuple[int, int, memoryview]]


def log_file_name(number: int) -> str:
    """Name of a log file."""
    return f"log-{number:05d}.sarp"


def _name(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<H", len(encoded)) + encoded


class LogStore:
    """A SegmentStore of append-only files in one directory."""

    def __init__(self, directory: Path, file_bytes_max: int) -> None:
        self._directory = directory
        self._tail = LogTail(file_bytes_max, incarnation=1, file=1, lsn=0)
        self._descriptors: dict[int, int] = {}
        self._writer = ThreadPoolExecutor(1, "sarp-log-writer")
        self._writing = asyncio.Lock()  # one write at a time; held across our own thread's work only
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writes: set[asyncio.Task[None]] = set()
        self._unsynced: set[int] = set()
        self._closed = False
        self._told = False
        self._failure: BaseException | None = None
        # Bound for the match path: one attribute lookup, one call.
        self.read_cached: Callable[[SegmentBatch], int] = self._tail.read_cached
        self.read_wait: Callable[[SegmentBatch], None] = self._tail.read_wait

    @classmethod
    async def create(cls, directory: Path, file_bytes_max: int = limits.LOG_FILE_BYTES_MAX) -> LogStore:
        """A new store in an empty or absent directory."""

        def prepare() -> None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(directory.iterdir()):
                raise StorageError(
                    f"{directory} is not empty: give a new directory, this version cannot open an old store"
                )

        await asyncio.get_running_loop().run_in_executor(None, prepare)
        return cls(directory, file_bytes_max)

    # --- putting -----------------------------------------------------------------------------------------------------

    def put(self, writes: SegmentBatch) -> None:
        """Take changed segments and note in each where it stands."""
        self._check()
        self._tail.append_segments(writes)
        self._schedule()

    def put_namespace(self, namespace_id: int, fields: tuple[str, ...], block_size: int) -> None:
        """Record a namespace."""
        payload = struct.pack("<II", namespace_id, block_size) + b"".join(_name(field) for field in fields)
        self._put_record(RecordType.NAMESPACE, payload)

    def put_worker(self, worker: int, instance_id: str, dp_rank: int) -> None:
        """Record a worker under its index."""
        self._put_record(RecordType.WORKER, struct.pack("<IH", worker, dp_rank) + _name(instance_id))

    def put_worker_mark(self, worker: int, generation: int, seq: int) -> None:
        """Record a worker's generation and the highest seq applied."""
        self._put_record(RecordType.WORKER_MARK, struct.pack("<IIq", worker, generation, seq))

    def _put_record(self, kind: RecordType, payload: bytes) -> None:
        self._check()
        self._tail.append_record(kind, payload)
        self._schedule()

    def _check(self) -> None:
        if self._closed:
            raise StorageError("the log is closed")
        self._check_failure()

    def _check_failure(self) -> None:
        if self._failure is not None:
            self._told = True
            raise StorageError(f"the log could not be written: {self._failure}") from self._failure

    # --- writing -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(WRITE_DELAY_MS / 1000, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        if self._failure is None:
            _ = self._start_write(sync=False)

    def _start_write(self, *, sync: bool) -> asyncio.Task[None]:
        """Write in a task of its own: it goes on to its end when a caller who waits for it is cancelled."""
        task = self._loop.create_task(self._write(sync=sync), name="sarp-log-write")
        self._writes.add(task)
        task.add_done_callback(self._written)
        return task

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # kept in _failure: every later put, room and sync raises it

    async def _write(self, *, sync: bool) -> None:
        """Write what has gathered; `sync` makes it and all before it durable."""
        async with self._writing:
            self._check_failure()
            sealed = self._tail.begin_write()
            try:
                opened = await self._loop.run_in_executor(self._writer, self._write_blocking, sealed, sync)
            except OSError as error:
                self._failure = error
                raise StorageError(f"the log could not be written: {error}") from error
            for number, descriptor in opened.items():
                self._tail.set_descriptor(number, descriptor)
            self._tail.end_write()

    def _write_blocking(self, sealed: Sealed, sync: bool) -> dict[int, int]:
        """In the writer thread, which alone touches `_descriptors` and `_unsynced` until `close`."""
        opened: dict[int, int] = {}
        for number, offset, data in sealed:
            if number not in self._descriptors:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                opened[number] = self._descriptors[number] = os.open(
                    self._directory / log_file_name(number), flags, mode=0o600
                )
            self._unsynced.add(number)
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptors[number], data[done:], offset + done)
        if sync and self._unsynced:
            for number in self._unsynced:
                os.fdatasync(self._descriptors[number])
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)  # the names of new files
            finally:
                os.close(directory)
            self._unsynced.clear()
        return opened

    async def room(self) -> None:
        """Wait until what is not written yet is below its bound."""
        self._check()
        if self._tail.unwritten_bytes > limits.LOG_TAIL_BYTES_MAX:
            await self._write_now(sync=False)

    async def sync(self) -> None:
        """Make all that was put durable."""
        self._check()
        await self._write_now(sync=True)

    async def _write_now(self, *, sync: bool) -> None:
        try:
            await asyncio.shield(self._start_write(sync=sync))
        except StorageError:
            self._told = True
            raise

    # --- the rest ----------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """Counters at this moment."""
        tail = self._tail
        return StoreStatistics(tail.bytes_appended, tail.live_bytes, tail.damaged, tail.calls)

    async def close(self) -> None:
        """Write out and sync everything, and close the files. Raises what a write failed with if nobody was told yet.

        Closing again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if not self._told:
                await self._write_now(sync=True)
        finally:
            if self._writes:
                await asyncio.wait(self._writes)
            for number in self._descriptors:
                self._tail.set_descriptor(number, -1)
            await self._loop.run_in_executor(None, self._close_blocking)

    def _close_blocking(self) -> None:
        self._writer.shutdown()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
