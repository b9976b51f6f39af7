"""The one door to the disk: all changes go through it, names are made durable, a cancelled opening leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from sarp_cluster.errors import StorageError
from sarp_cluster.storage.file_system import DISK, FileSystem, run_to_end
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.store_directory import LOCK_NAME, log_file_name
from sarp_cluster.testing.stores import open_log_store
from shard.index import Index

WAIT_MAX_S = 20
SECRET = bytes(32)


class Told(FileSystem):
    """Notes what is asked of it, and in which thread."""

    def __init__(self) -> None:
        self.synced_directories: list[Path] = []
        self.threads: set[str] = set()

    def sync_directory(self, directory: Path) -> None:
        self.synced_directories.append(directory)
        super().sync_directory(directory)

    def open_to_read(self, path: Path) -> int:
        self.threads.add(threading.current_thread().name)
        return super().open_to_read(path)


class Slow(FileSystem):
    """Stops before it reads a log file, until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def read(self, path: Path, begin: int = 0, length: int | None = None) -> bytes:
        self.begun.set()
        assert self.go_on.wait(WAIT_MAX_S)
        return super().read(path, begin, length)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_the_name_of_a_new_store_is_made_durable(tmp_path: Path) -> None:
    told = Told()
    store, _ = await LogStore.open(tmp_path / "a" / "b", segment_blocks=64, file_system=told)
    await store.close()
    assert {tmp_path, tmp_path / "a"} <= set(told.synced_directories)


async def test_the_name_of_a_store_that_a_killed_process_made_is_made_durable(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    told = Told()
    store, _ = await LogStore.open(tmp_path / "store", segment_blocks=64, file_system=told)
    await store.close()
    assert tmp_path in told.synced_directories


async def test_log_files_are_opened_in_a_helper_thread(tmp_path: Path) -> None:
    store = await open_log_store(tmp_path)
    store.put_worker(0, "w", 0)
    await store.close()
    told = Told()
    store, _ = await LogStore.open(tmp_path, segment_blocks=64, file_system=told)
    await store.close()
    assert told.threads
    assert threading.current_thread().name not in told.threads


async def test_a_cancelled_opening_leaves_neither_lock_nor_descriptors(tmp_path: Path) -> None:
    store = await open_log_store(tmp_path)
    store.put_worker(0, "w", 0)
    await store.close()
    before = open_descriptors()
    slow = Slow()
    opening = asyncio.create_task(Index.open(tmp_path, secret=SECRET, file_system=slow))
    await asyncio.to_thread(slow.begun.wait, WAIT_MAX_S)
    for _ in range(2):
        opening.cancel()
        await asyncio.sleep(0)
    assert not opening.done(), "the helper thread still has the store"
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert open_descriptors() == before
    await (await Index.open(tmp_path, secret=SECRET)).close()


async def test_a_store_that_is_open_is_refused_and_leaves_no_descriptors(tmp_path: Path) -> None:
    store = await open_log_store(tmp_path)
    before = open_descriptors()
    with pytest.raises(StorageError, match="open in another process"):
        await open_log_store(tmp_path)
    assert open_descriptors() == before
    await store.close()


async def test_a_torn_tail_is_cut_off_on_a_full_disk(tmp_path: Path) -> None:
    """There is no space to set it aside, and it was never acknowledged."""

    class Full(FileSystem):
        def create(self, path: Path, *, replace: bool = False) -> int:
            descriptor = super().create(path, replace=replace)
            self.close(descriptor)
            raise OSError(errno.ENOSPC, "full")

    store = await open_log_store(tmp_path)
    store.put_worker(0, "w", 0)
    await store.close()
    whole = (tmp_path / log_file_name(1)).read_bytes()
    (tmp_path / log_file_name(1)).write_bytes(whole + b"torn")
    store, recovered = await LogStore.open(tmp_path, segment_blocks=64, file_system=Full())
    await store.close()
    assert recovered.log.cut is not None
    assert (tmp_path / log_file_name(1)).read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == [LOCK_NAME, log_file_name(1)]


async def test_what_runs_to_its_end_gives_its_result_or_its_error() -> None:
    assert await run_to_end(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await run_to_end(lambda: 1 // 0)


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    descriptor = DISK.create(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda to, data, offset: real(to, data[:3], offset))
        DISK.write(descriptor, b"0123456789", 2)
    DISK.close(descriptor)
    assert DISK.read(tmp_path / "file") == bytes(2) + b"0123456789"


def test_a_new_file_takes_no_others_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"here")
    with pytest.raises(FileExistsError):
        DISK.create(tmp_path / "file")
    DISK.close(DISK.create(tmp_path / "file", replace=True))
    assert DISK.size(tmp_path / "file") == 0
