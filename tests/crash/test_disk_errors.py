"""A disk that fails and a disk that is full."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.errors import StoreFullError
from sarp_cluster.types import Worker
from shard.index import Index
from tests import capabilities
from tests.crash.check import check
from tests.crash.driver import EXIT_POISONED
from tests.crash.ledger import CONFIG, SECRET, SPEC, Ledger, Operation, read_ledger
from tests.crash.programs import command, run, strace

# A sync that fails: nothing is acknowledged after it, and it is not tried again.


def fail_sync(tmp_path: Path, number: int) -> None:
    capabilities.require(capabilities.strace)
    store, ledger, trace = tmp_path / "store", tmp_path / "ledger", tmp_path / "trace"
    expressions = ("trace=fdatasync,write", "decode-fds=path", f"inject=fdatasync:error=EIO:when={number}")
    tracer = strace(store, *expressions, output=trace)
    status, errors = run([*tracer, "-P", str(ledger), *command(store, ledger, "--seed", number, "--operations", 30)])
    assert status == EXIT_POISONED, errors
    assert "poisoned" in errors
    calls = [line for line in trace.read_text().splitlines() if "resumed>" not in line or "EIO" in line]
    failed = next(i for i, line in enumerate(calls) if "EIO" in line)
    after = calls[failed + 1 :]
    assert not [line for line in after if "fdatasync(" in line], "a sync was tried again"
    assert not [line for line in after if '"acked' in line], "something was acknowledged after a sync had failed"
    check(store, ledger)


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_sync_fails(tmp_path: Path, number: int) -> None:
    fail_sync(tmp_path, number)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_every_sync_fails(tmp_path: Path) -> None:
    for number in range(1, 25):
        (tmp_path / str(number)).mkdir()
        fail_sync(tmp_path / str(number), number)


def test_the_sync_of_the_directory_fails(tmp_path: Path) -> None:
    capabilities.require(capabilities.strace)
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    tracer = strace(store, "trace=fsync", "inject=fsync:error=EIO:when=2")
    status, errors = run([*tracer, *command(store, ledger)])
    assert status == EXIT_POISONED, errors
    check(store, ledger)


def test_recovery_syncs_what_it_builds_on(tmp_path: Path) -> None:
    """What a killed process had written but not synced is in the page cache alone: the power may fail yet."""
    capabilities.require(capabilities.strace)
    store, ledger, trace = tmp_path / "store", tmp_path / "ledger", tmp_path / "trace"
    run(command(store, ledger, "--burst"))
    logs = {path.name for path in store.glob("log-*.sarp")}
    status, errors = run(
        [*strace(store, "trace=fdatasync", "decode-fds=path", output=trace), *command(store, ledger, "--reopen")]
    )
    assert status == 0, errors
    assert not {name for name in logs if name not in trace.read_text()}


# A full disk: nothing new is taken, matches go on, and so do inserts once there is space, without a restart.


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory."""
    capabilities.require(capabilities.tmpfs)
    mounted = tmp_path / "small"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mounted], check=True)  # noqa: S603, S607
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)  # noqa: S603, S607


class Writer:
    """Inserts with a ledger, into one open index."""

    def __init__(self, index: Index, ledger: Ledger) -> None:
        self.index = index
        self.namespace = index.create_namespace(SPEC)
        self.ledger = ledger

    async def insert(self, worker: str, first_token: int, *, generation: int = 0) -> None:
        operation = Operation("insert", worker, generation, tuple(range(first_token, first_token + 40)))
        number = self.ledger.pending(operation)
        try:
            await self.index.insert(self.namespace, operation.block_ids, **operation.arguments())
        except StoreFullError:
            self.ledger.answered(number, "refused")
            raise
        self.ledger.answered(number, "acked")

    async def fill(self) -> int:
        """Insert until it is refused; how many were taken."""
        for count in range(100_000):
            try:
                await self.insert("filler", 1_000_000 + 100 * count)
            except StoreFullError:
                return count
        raise AssertionError("it is never full")

    async def until_taken(self, worker: str, first_token: int, *, generation: int = 0) -> None:
        """Insert as soon as there is space again."""
        for _ in range(50):
            try:
                return await self.insert(worker, first_token, generation=generation)
            except StoreFullError:
                await asyncio.sleep(0.1)
        raise AssertionError("inserts did not go on after space was freed")


def fill_up(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, size)
    os.close(descriptor)


def test_full_then_free_again(small: Path, tmp_path: Path) -> None:
    store, filler = small / "store", small / "filler"

    async def main() -> None:
        fill_up(filler, 1 << 20)
        index = await Index.open(store, CONFIG, secret=SECRET)
        try:
            writer = Writer(index, Ledger(tmp_path / "ledger"))
            taken = await writer.fill()
            assert taken > 10
            with pytest.raises(StoreFullError):
                await writer.insert("refused", 0)
            for entry in read_ledger(tmp_path / "ledger")[:taken]:
                answer = await index.match(writer.namespace, entry.operation.block_ids)
                assert answer.matched_blocks == 40
            filler.unlink()
            await writer.until_taken("later", 500)
            assert await writer.fill() > 10, "all of the space that was freed is used"
        finally:
            await index.close()  # what was taken still fits: it is refused before the disk is full

    asyncio.run(main())
    grow(small)
    check(store, tmp_path / "ledger")


def grow(mounted: Path) -> None:
    """Make space, so that a store can be opened and closed."""
    subprocess.run(["mount", "-o", "remount,size=4m", mounted], check=True)  # noqa: S603, S607


def test_a_store_that_churns_lives_on_a_small_disk(small: Path, tmp_path: Path) -> None:
    """Many times the disk is written. Where that is too fast for reclaiming, inserts are refused for a moment."""
    store = small / "store"
    config = dataclasses.replace(CONFIG, log_file_bytes=16_384, snapshot_log_bytes=65_536)

    async def main() -> int:
        index = await Index.open(store, config, secret=SECRET)
        try:
            writer = Writer(index, Ledger(tmp_path / "ledger"))
            for generation in range(60):
                for number in range(30):
                    await writer.until_taken("churning", 1_000 * number, generation=generation)
            assert index.statistics().reclaimed_files > 10
            return index.store.bytes_appended
        finally:
            await index.close()

    fill_up(small / "filler", 1 << 20)
    assert asyncio.run(main()) > 3 << 20
    check(store, tmp_path / "ledger")


def test_workers_that_come_while_it_is_full(small: Path, tmp_path: Path) -> None:
    """A worker or a generation that could not be recorded is not half known."""
    store, filler = small / "store", small / "filler"

    async def main() -> None:
        fill_up(filler, 1 << 20)
        index = await Index.open(store, CONFIG, secret=SECRET)
        try:
            writer = Writer(index, Ledger(tmp_path / "ledger"))
            await writer.insert("known", 0)
            await writer.fill()
            for worker, generation in (("new", 0), ("new", 1), ("known", 2)):
                with pytest.raises(StoreFullError):
                    await index.clear_worker(Worker(worker), generation=generation)
            answer = await index.match(writer.namespace, read_ledger(tmp_path / "ledger")[0].operation.block_ids)
            assert answer.matched_blocks == 40, "a clear that was refused has cleared"
            filler.unlink()
            await writer.until_taken("third", 500)
            await writer.insert("new", 1_500, generation=1)
            await writer.insert("known", 2_500)
        finally:
            await index.close()

    asyncio.run(main())
    check(store, tmp_path / "ledger")


async def test_a_write_that_did_not_fit_is_not_the_sync_of_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put while a write runs that does not fit: answered as durable only once it is."""
    real, failing = os.pwrite, [True]
    index = await Index.open(tmp_path / "store", CONFIG, secret=SECRET)
    namespace = index.create_namespace(SPEC)
    second: list[asyncio.Task[Any]] = []
    loop = asyncio.get_running_loop()

    def insert(first_token: int) -> asyncio.Task[Any]:
        operation = Operation("insert", "worker", 0, tuple(range(first_token, first_token + 20)))
        return loop.create_task(index.insert(namespace, operation.block_ids, worker=operation.holder))

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if failing.pop() if failing else False:
            asyncio.run_coroutine_threadsafe(put_more(), loop).result()
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, offset)

    async def put_more() -> None:
        second.append(insert(100))
        await asyncio.sleep(0.01)

    monkeypatch.setattr(os, "pwrite", pwrite)
    first = insert(0)
    with pytest.raises(StoreFullError):
        await first
    result = await second[0]
    assert result.durable
    assert index.store.durable_lsn == index.store.lsn
    await index.close()
