"""The log: our native segment store (design §5). Append-only files of framed records; write-ahead log and store in one.

Files are named log-NNNNN.sarp in the store's directory. Appending happens in memory (log_tail); a writer thread writes
what has gathered, at the latest WRITE_DELAY_MS after the first byte, and syncs when asked to.
"""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from sarp_cluster import limits
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.errors import StorageError, StoreFullError, StorePoisonedError
from sarp_cluster.storage.file_system import DISK, FileSystem, run_to_end
from sarp_cluster.storage.log_files import LogFiles
from sarp_cluster.storage.log_space import LogSpace
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType, pack_removal, pack_removal_again
from sarp_cluster.storage.recovery import Progress, header_prefix
from sarp_cluster.storage.registry import pack_namespace, pack_worker, pack_worker_mark
from sarp_cluster.storage.segment_store import StoreStatistics
from sarp_cluster.storage.snapshot import RecoveredStore, recover_newest
from sarp_cluster.storage.store_directory import keep, lock, log_file_name

WRITE_DELAY_MS: Final = 5
"""Appended bytes wait at most so long in memory before they are written to their file."""

RELAXED_SYNC_MS: Final = 100
"""What was put without waiting for a sync is synced after at most about so long."""

RECLAIMED: Final = 9
"""Type of the record that nothing of a log file is needed any more."""

Sealed = list[tuple[int, int, memoryview]]


class NoSpaceError(OSError):
    """A write did not fit. Unlike a failed sync it may be repeated: nothing was promised yet."""


class _Opened(NamedTuple):
    """A store that is locked and recovered: the work of the helper thread."""

    lock_descriptor: int
    recovered: RecoveredStore
    descriptors: dict[int, int]
    """By the number of the log file."""
    lengths: dict[int, int]
    """By the number of the log file."""


def _close_all(file_system: FileSystem, descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        file_system.close(descriptor)


class LogStore:
    """A SegmentStore of append-only files in one directory."""

    def __init__(
        self, directory: Path, file_system: FileSystem, opened: _Opened, *, file_bytes_max: int, segment_blocks: int
    ) -> None:
        log = opened.recovered.log
        self._directory = directory
        self._file_system = file_system
        self._lock_descriptor = opened.lock_descriptor
        self._loop = asyncio.get_running_loop()
        # Recovery never appends to an old file: what is behind a cut may still stand on the disk.
        self._tail = LogTail(
            file_bytes_max,
            incarnation=1 + max(log.files, default=0),
            file=1 + max(log.files, default=0),
            lsn=log.lsn,
            header=header_prefix(segment_blocks),
            files=LogFiles(opened.lengths, log.live_bytes),
        )
        self._opened_lsn = self._tail.lsn
        self._descriptors = opened.descriptors
        for number, descriptor in self._descriptors.items():
            self._tail.set_descriptor(number, descriptor)
        self.space = LogSpace(directory, file_system, self._tail, self._descriptors)
        self._writer = ThreadPoolExecutor(1, "sarp-log-writer")
        self._writing = asyncio.Lock()  # one write at a time; held across our own thread's work only
        self._timer: asyncio.TimerHandle | None = None
        self._writes: set[asyncio.Task[None]] = set()
        self._unsynced: set[int] = set()
        self._new_names = False
        """Is the name of a log file not durable yet?"""
        self._removals: dict[int, asyncio.Task[None]] = {}
        self._closed = False
        self._told = False
        self.failure: OSError | None = None
        """What poisoned the store: nothing is acknowledged any more."""
        self._full: OSError | None = None
        self._sealed: Sealed | None = None
        self._sealed_lsn = 0
        self._durable_lsn = log.lsn
        self._synced_at = self._loop.time()
        self._next_sync: asyncio.Task[None] | None = None
        # Bound for the match path: one attribute lookup, one call.
        self.read_cached: Callable[[SegmentBatch], int] = self._tail.read_cached
        self.read_wait: Callable[[SegmentBatch], None] = self._tail.read_wait
        self.damaged_reads: Callable[[], int] = lambda: self._tail.damaged
        self.note_dead: Callable[[memoryview[int]], None] = self._tail.files.note_dead

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        segment_blocks: int,
        layout: str | None = None,
        file_bytes_max: int = limits.LOG_FILE_BYTES_MAX,
        progress: Progress | None = None,
        file_system: FileSystem = DISK,
    ) -> tuple[LogStore, RecoveredStore]:
        """The store in `directory`, new or recovered: from a snapshot with this `layout`, if there is one.

        Raises StorageError when another process has it open, CorruptRecordError when acknowledged records are damaged.
        """

        def prepare() -> _Opened:
            opened: dict[int, int] = {}
            descriptor = lock(directory, file_system)
            try:
                recovered = recover_newest(file_system, directory, segment_blocks, layout, progress)
                files = recovered.log.files
                if not files:
                    keep(directory, file_system)
                for number, path in files.items():
                    opened[number] = file_system.open_to_read(path)
                lengths = {number: file_system.size(path) for number, path in files.items()}
            except BaseException:
                _close_all(file_system, [*opened.values(), descriptor])
                raise
            return _Opened(descriptor, recovered, opened, lengths)

        def undo(opened: _Opened) -> None:
            _close_all(file_system, [*opened.descriptors.values(), opened.lock_descriptor])

        opened = await run_to_end(prepare, undo)
        store = cls(directory, file_system, opened, file_bytes_max=file_bytes_max, segment_blocks=segment_blocks)
        return store, opened.recovered

    # --- putting -----------------------------------------------------------------------------------------------------

    def put(self, writes: SegmentBatch, *, reclaiming: bool = False) -> None:
        """Take changed segments and note in each where it stands.

        With `reclaiming`, here as below, the space that is kept back for that may be used.
        """
        self._check(reclaiming=reclaiming)
        self._tail.append_segments(writes)
        self._schedule()

    def put_namespace(
        self,
        namespace_id: int,
        fields: tuple[str, ...],
        block_size: int,
        key_check: bytes,
        *,
        reclaiming: bool = False,
    ) -> None:
        """Record a namespace; `key_check` (8 bytes) tells later whether a key is its key."""
        payload = pack_namespace(namespace_id, fields, block_size, key_check)
        self._put_record(RecordType.NAMESPACE, namespace_id, payload, reclaiming)

    def put_worker(self, worker: int, instance_id: str, dp_rank: int, *, reclaiming: bool = False) -> None:
        """Record a worker under its index."""
        self._put_record(RecordType.WORKER, worker, pack_worker(worker, instance_id, dp_rank), reclaiming)

    def put_worker_mark(self, worker: int, generation: int, seq: int, *, reclaiming: bool = False) -> None:
        """Record a worker's generation and the highest seq applied."""
        payload = pack_worker_mark(worker, generation, seq)
        self._put_record(RecordType.WORKER_MARK, worker, payload, reclaiming)

    def put_removal(self, row: Mapping[str, int]) -> None:
        """Record that a segment, which had this row and cannot be read, is gone."""
        self._put_record(RecordType.REMOVAL, row["slot"], pack_removal(row), True)
        self._tail.files.note_gone(row["slot"], row["image"], row["delta"])

    def put_lost(self, *places: int) -> None:
        """Record that what stands at these places need not be read: a damaged segment is gone, or was written anew."""
        for place in filter(None, places):
            self._put_record(RecordType.LOST, place, struct.pack("<Q", place), True)

    def put_removal_again(self, slot: int) -> None:
        """Record once more that a slot is free: what said so before is reclaimed."""
        self._put_record(RecordType.REMOVAL, slot, pack_removal_again(slot), True)

    def _put_record(self, kind: RecordType, number: int, payload: bytes, reclaiming: bool) -> None:
        """Put a record that says something new of what has this number."""
        self._check(reclaiming=reclaiming)
        self._tail.append_record(kind, payload)
        self.space.in_force.put(kind, number, self._tail.file, len(payload))
        self._schedule()

    def _check(self, *, reclaiming: bool = False) -> None:
        """Raise if nothing can be put any more, or not now."""
        if self._closed:
            raise StorageError("the log is closed")
        self._check_failure()
        if self._full is not None:
            raise StoreFullError(f"{self._directory}: {self._full.strerror}; inserts go on once there is space")
        if self.space.low and not reclaiming:
            raise StoreFullError(f"{self._directory}: nearly no space left; inserts go on once there is more")

    def _check_failure(self) -> None:
        if self.failure is not None:
            self._told = True
            raise StorePoisonedError(
                f"the log could not be written: {self.failure}; end this process and recover from the disk"
            ) from self.failure

    def keep_from(self, number: int) -> None:
        """Log files from this number on are needed by the oldest kept snapshot."""
        self.space.oldest_needed_file = number

    def poison(self, error: OSError) -> None:
        """The disk has failed elsewhere in this store: nothing is acknowledged any more."""
        if self.failure is None:
            self.failure = error

    # --- writing -----------------------------------------------------------------------------------------------------

    @property
    def lsn(self) -> int:
        """LSN of the last record put."""
        return self._tail.lsn

    @property
    def position(self) -> tuple[int, int]:
        """Where the next record will stand, unless its file is full: (file, offset)."""
        return self._tail.file, self._tail.offset

    @property
    def log_files(self) -> tuple[int, ...]:
        """The log files there are, in order, the present one last."""
        return tuple(sorted(self._tail.files.listed | {self._tail.file}))

    @property
    def bytes_appended(self) -> int:
        """Bytes appended since the store was opened."""
        return self._tail.bytes_appended

    @property
    def journal(self) -> Callable[[], Iterable[bytes]] | None:
        """Asked for payloads of records of type ROUTING before each group of records ends; None: there are none."""
        return self._tail.journal

    @journal.setter
    def journal(self, journal: Callable[[], Iterable[bytes]] | None) -> None:
        self._tail.journal = journal

    def append_journal(self) -> None:
        """Put what the journal has now, before the group ends: then `position` is behind it."""
        self._check()
        self._tail.append_journal()
        self._schedule()

    @property
    def durable_lsn(self) -> int:
        """LSN through which all records are durable."""
        return self._durable_lsn

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(WRITE_DELAY_MS / 1000, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        if self.failure is None:
            _ = self._start_write(sync=self._tail.lsn > self._durable_lsn and self._sync_due())

    def _sync_due(self) -> bool:
        """Has something put in relaxed mode waited its time?"""
        now = self._loop.time()
        if now - self._synced_at < RELAXED_SYNC_MS / 1000:
            self._schedule()
            return False
        return True

    def _start_write(self, *, sync: bool, vouch: bool = False) -> asyncio.Task[None]:
        """Write in a task of its own: it goes on to its end when a caller who waits for it is cancelled."""
        return self._start(self._write(sync=sync, vouch=vouch), "sarp-log-write")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return task

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # kept in _failure or _full: every later put, room and sync raises it

    async def _write(self, *, sync: bool, vouch: bool) -> None:
        """Write what has gathered; `sync` makes it and all before it durable. `vouch`: a group even if it is empty."""
        async with self._writing:
            if sync:
                self._next_sync = None  # who comes from now on may have put more than this one will cover
            self._check_failure()
            if self._sealed is not None:
                # What did not fit before. The sync is for what was put since, too.
                await self._write_sealed(self._sealed, sync=False)
            self._sealed = self._tail.begin_write(self._durable_lsn, vouch)
            self._sealed_lsn = self._tail.lsn
            await self._write_sealed(self._sealed, sync=sync)

    async def _write_sealed(self, sealed: Sealed, *, sync: bool) -> None:
        try:
            opened, free_bytes = await self._loop.run_in_executor(self._writer, self._write_blocking, sealed, sync)
        except NoSpaceError as error:
            # What was sealed stays where it is and is written again, at the same place, once there is space.
            self._full = error
            self._retry_when_full()
            raise StoreFullError(f"{self._directory}: {error.strerror}") from error
        except OSError as error:
            self.failure = error  # never tried again: the kernel may have dropped what it could not write
            raise StorePoisonedError(f"the log could not be written: {error}") from error
        for number, descriptor in opened.items():
            self._tail.set_descriptor(number, descriptor)
        self._tail.end_write()
        self._sealed = None
        self._full = None
        self.space.free_bytes = free_bytes
        if self.space.low:
            self._retry_when_full()
        if sync:
            self._durable_lsn = self._sealed_lsn
            self._synced_at = self._loop.time()

    def _retry_when_full(self, delay_ms: int | None = None) -> None:
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(
            (limits.FULL_RETRY_MS if delay_ms is None else delay_ms) / 1000, self._write_soon
        )

    def _write_blocking(self, sealed: Sealed, sync: bool) -> tuple[dict[int, int], int | None]:
        """In the writer thread, which alone touches `_descriptors` and `_unsynced` until `close`.

        Files that were opened are returned even if a later step of the same call has to be repeated.
        """
        try:
            for number, offset, data in sealed:
                if number not in self._descriptors:
                    self._descriptors[number] = self._file_system.create(self._directory / log_file_name(number))
                    self._new_names = True
                self._unsynced.add(number)
                self._file_system.write(self._descriptors[number], data, offset)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceError(error.errno, error.strerror) from error
            raise
        if sync and self._unsynced:
            for number in self._unsynced:
                self._file_system.sync(self._descriptors[number])
            if self._new_names:
                self._file_system.sync_directory(self._directory)
                self._new_names = False
            self._unsynced.clear()
        return {number: self._descriptors[number] for number, _, _ in sealed}, self.space.look_for_free_bytes()

    async def room(self, *, reclaiming: bool = False) -> None:
        """Wait until what is not written yet is below its bound."""
        self._check(reclaiming=reclaiming)
        if self._tail.unwritten_bytes > limits.LOG_TAIL_BYTES_MAX:
            await self._told_of(self._start_write(sync=False))

    async def sync(self) -> None:
        """Make all that was put durable.

        Group commit: callers who come while a sync runs share the next one, which covers what each of them has put.
        """
        if self._closed:
            raise StorageError("the log is closed")
        self._check_failure()
        await self._sync()

    async def _sync(self) -> None:
        if self._next_sync is None:
            self._next_sync = self._start_write(sync=True)
        await self._told_of(self._next_sync)

    async def _told_of(self, write: asyncio.Task[None]) -> None:
        try:
            await asyncio.shield(write)
        except StorePoisonedError:
            self._told = True
            raise

    # --- reclaiming space (shard.reclaim) -----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Are inserts refused for lack of space?"""
        return self._full is not None or self.space.low

    def next_file(self) -> None:
        """Close the file that is written to, so that it can be reclaimed, and go on in the next one."""
        self._check(reclaiming=True)
        self._tail.next_file()
        self._schedule()

    def put_reclaimed(self, number: int) -> None:
        """Record that nothing of a log file is needed any more. What takes its place must be durable before."""
        self._check(reclaiming=True)
        self._tail.append_record(RECLAIMED, struct.pack("<I", number))
        self._tail.files.unlist(number)
        self._schedule()

    async def remove_file(self, number: int) -> None:
        """Delete a log file of which it is durable that it is reclaimed. Reads in flight can go on to their end.

        Nothing happens if it was deleted meanwhile, for a caller who was cancelled.
        """
        self._check_failure()
        if not self.space.files.bytes_of(number):
            return
        if number not in self._removals:
            self._removals[number] = self._start(self._remove(number), "sarp-log-remove")
        await self._told_of(self._removals[number])

    async def _remove(self, number: int) -> None:
        try:
            await self._loop.run_in_executor(None, self.space.delete, number)
        except OSError as error:
            self.failure = error  # nobody knows what the directory holds now
            raise StorePoisonedError(f"{self._directory}: a log file could not be deleted: {error}") from error
        del self._removals[number]
        await self._close_files(self.space.removed(number))

    def begin_read(self) -> int:
        """A helper thread is about to read. What segments point to now stays readable until `end_read`."""
        return self.space.reads.begin()

    def end_read(self, read: int) -> None:
        """It is done; `read` is what `begin_read` returned."""
        self.space.reads.end(read)
        if not self._closed and (descriptors := self.space.unread()):
            _ = self._start(self._close_files(descriptors), "sarp-log-close")

    async def _close_files(self, descriptors: list[int]) -> None:
        """Of deleted files. Only now their space is given back, and that may take its time."""
        if not descriptors:
            return
        await self._loop.run_in_executor(None, _close_all, self._file_system, descriptors)
        if self.full:
            self._retry_when_full(0)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """Counters at this moment."""
        tail = self._tail
        files = tail.files
        return StoreStatistics(files.disk_bytes, max(0, files.live_bytes), tail.damaged, tail.calls)

    async def close(self) -> None:
        """Write out and sync everything, and close the files. Raises what a write failed with if nobody was told yet.

        A store into which nothing was put stays as it is on the disk. Closing again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if not self._told and self._tail.lsn > self._opened_lsn:
                await self._sync()
                # Only now something behind the last group says that it was durable: damage in it is known as such.
                with suppress(StoreFullError):
                    await self._start_write(sync=False, vouch=True)
        finally:
            while self._writes:
                await asyncio.wait(self._writes)
            for number in self._descriptors:
                self._tail.set_descriptor(number, -1)
            await self._loop.run_in_executor(None, self._close_blocking)

    def _close_blocking(self) -> None:
        self._writer.shutdown()
        _close_all(self._file_system, [*self._descriptors.values(), self._lock_descriptor])
        self._descriptors.clear()
