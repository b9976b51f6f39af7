"""The log as a segment store: what was put is read wherever it lies and durable once synced; a failure stays one."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Buffer

from sarp_cluster import limits
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.errors import InvariantViolationError, StorageError, StoreFullError
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.store_directory import LOG_NAME, log_file_name
from sarp_cluster.testing.segments import make_batch, make_unread_batch, unpack_place
from sarp_cluster.testing.stores import open_log_store

TO_READ, READ, DAMAGED = 0, 1, 2
IMAGE, DELTA = 1, 2
FRAME_BYTES = 32
HEADER_RECORD_BYTES = 48
"""Of the first file; a later one names the older ones."""
FILE_BYTES_MIN = 4096
WAIT_MAX_S = 20

Segment = dict[str, Any]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_MAX_S):
            await test()

    asyncio.run(bounded())


@asynccontextmanager
async def opened(directory: Path, file_bytes_max: int = limits.LOG_FILE_BYTES_MAX) -> AsyncIterator[LogStore]:
    store = await open_log_store(directory, file_bytes_max=file_bytes_max)
    try:
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


def segment(slot: int, blocks: int = 8) -> Segment:
    return {
        "slot": slot,
        "tag": slot % 7,
        "window": slot % 5,
        "ids": [slot << 32 | block for block in range(blocks)],
        "runs": [{"worker": slot % 3, "generation": 0, "tier": 1, "mask": 2**blocks - 1, "handle": slot}],
    }


def put(store: LogStore, *segments: Segment) -> list[Segment]:
    """Put segments. Returns them with the places where they stand."""
    batch = make_batch(segments)
    store.put(batch)
    return [
        fields | {"image": item["image"], "delta": item["delta"]}
        for fields, item in zip(segments, batch.describe(), strict=True)
    ]


def assert_read(batch: SegmentBatch, segments: list[Segment]) -> None:
    for item, fields in zip(batch.describe(), segments, strict=True):
        assert item["state"] == READ, item
        for name in ("slot", "ids", "runs"):
            assert item[name] == fields[name]


def files_in(directory: Path) -> dict[str, int]:
    """The log files and how long they are."""
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if LOG_NAME.fullmatch(path.name)}


def drop_page_cache(path: Path) -> None:
    """Ask the kernel to forget a file that is synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def forgets_pages(directory: Path) -> bool:
    """Does this file system drop pages when asked, and tell that it has to wait for them?"""
    path = directory / "probe"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(descriptor, bytes(4096), 0)
        os.fsync(descriptor)
        drop_page_cache(path)
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink()
    return False


def reads_without_waiting(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.pread(descriptor, 1, 0)
        return os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


# --- where a record is read from --------------------------------------------------------------------------------------


def test_what_was_just_put_is_read_from_memory(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = put(store, *(segment(slot) for slot in range(256, 300)))
            batch = make_unread_batch(placed)
            assert store.read_cached(batch) == 0
            assert_read(batch, placed)
            assert store.statistics().read_calls == 0

    run(test)


def test_what_was_written_is_read_from_the_page_cache_by_one_call(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = put(store, *(segment(slot) for slot in range(256, 300)))
            await store.sync()
            if not reads_without_waiting(tmp_path / log_file_name(1)):
                pytest.skip("this file system cannot read without waiting")
            batch = make_unread_batch(placed)
            assert store.read_cached(batch) == 0
            assert_read(batch, placed)
            assert store.statistics().read_calls == 1

    run(test)


def test_what_left_the_page_cache_is_left_to_read_wait(tmp_path: Path) -> None:
    if not forgets_pages(tmp_path):
        pytest.skip("this file system keeps its pages, or cannot tell whether it has them")

    async def test() -> None:
        async with opened(tmp_path, FILE_BYTES_MIN) as store:
            placed = [*put(store, segment(256), segment(257))]
            for slot in range(258, 300):
                placed += put(store, segment(slot))
            await store.sync()
            for number in range(1, unpack_place(placed[-1]["image"])[0] + 1):
                drop_page_cache(tmp_path / log_file_name(number))
            batch = make_unread_batch(placed)
            assert store.read_cached(batch) == len(placed)
            assert all(item["state"] == TO_READ for item in batch.describe())
            await asyncio.to_thread(store.read_wait, batch)
            assert_read(batch, placed)

    run(test)


def test_one_wave_takes_memory_and_disk_together(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, FILE_BYTES_MIN) as store:
            written = put(store, *(segment(slot) for slot in range(256, 280)))
            await store.sync()
            waiting = put(store, *(segment(slot) for slot in range(280, 300)))
            mixed = written + waiting
            random.Random(1).shuffle(mixed)
            batch = make_unread_batch(mixed)
            if store.read_cached(batch):
                await asyncio.to_thread(store.read_wait, batch)
            assert_read(batch, mixed)

    run(test)


def test_records_far_apart_and_twice_in_one_wave_are_read(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = [one for slot in range(256, 400) for one in put(store, segment(slot, 64))]
            await store.sync()
            chosen = [*placed[::7], placed[0], placed[70], placed[3], placed[4]]
            assert len(chosen) < 40 < len(placed)
            for wanted in (chosen, placed[::-1]):  # short and long lists are sorted in different ways
                batch = make_unread_batch(wanted)
                store.read_wait(batch)
                assert_read(batch, wanted)

    run(test)


def test_image_and_delta_are_read_together(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            (base,) = put(store, segment(256, 4))
            put(store, *(segment(slot, 64) for slot in range(257, 280)))
            (whole,) = put(store, segment(256, 6) | {"image": base["image"], "image_count": 4, "write": DELTA})
            assert whole["image"] == base["image"]
            assert whole["delta"]
            for _ in range(2):
                batch = make_unread_batch([whole])
                if store.read_cached(batch):
                    store.read_wait(batch)
                assert_read(batch, [whole])
                await store.sync()

    run(test)


def test_a_write_in_progress_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written, and what was put since, is still read from memory."""
    begun, go_on = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def slow(descriptor: int, data: Buffer, offset: int) -> int:
        begun.set()
        go_on.wait(WAIT_MAX_S)
        return pwrite(descriptor, data, offset)

    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = put(store, segment(256))
            monkeypatch.setattr(os, "pwrite", slow)
            syncing = asyncio.create_task(store.sync())
            await asyncio.to_thread(begun.wait)
            placed += put(store, segment(257))
            batch = make_unread_batch(placed)
            assert store.read_cached(batch) == 0
            assert_read(batch, placed)
            assert store.statistics().read_calls == 0
            go_on.set()
            await syncing
            batch = make_unread_batch(placed)
            if store.read_cached(batch):
                store.read_wait(batch)
            assert_read(batch, placed)

    run(test)


# --- files ------------------------------------------------------------------------------------------------------------


def records_of(path: Path, number: int) -> list[int]:
    """Types of the records of a file, which must fill it."""
    data, at, types = path.read_bytes(), 0, []
    while at < len(data):
        header = read_frame(data, at, number, at)
        assert header is not None
        types.append(header.type)
        at += (FRAME_BYTES + header.payload_bytes + 7) // 8 * 8
    return types


def test_a_full_file_is_followed_by_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "log"

    async def test() -> None:
        async with opened(directory, FILE_BYTES_MIN) as store:
            placed = [one for slot in range(256, 356) for one in put(store, segment(slot))]
            store.put_worker(0, "w", 0)
            await store.sync()
            batch = make_unread_batch(placed)
            store.read_wait(batch)
            assert_read(batch, placed)
            places = [unpack_place(one["image"]) for one in placed]
            assert places == sorted(places)
            assert len({file for file, _, _ in places}) > 3

    run(test)
    sizes = files_in(directory)
    assert list(sizes) == [log_file_name(number) for number in range(1, len(sizes) + 1)]
    assert all(FILE_BYTES_MIN // 2 < size <= FILE_BYTES_MIN for size in list(sizes.values())[:-1])
    for number in range(1, len(sizes) + 1):
        types = records_of(directory / log_file_name(number), number)
        assert types[0] == RecordType.FILE_HEADER
        assert RecordType.FILE_HEADER not in types[1:]


def test_what_is_put_together_stands_in_one_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, FILE_BYTES_MIN) as store:
            put(store, segment(256))
            large = put(store, *(segment(slot, 64) for slot in range(257, 300)))  # over the size of a file
            after = put(store, segment(300))
            assert {unpack_place(one["image"])[0] for one in large} == {2}
            assert unpack_place(large[0]["image"])[1] == HEADER_RECORD_BYTES + 8
            assert unpack_place(after[0]["image"])[0] == 3
            await store.sync()
            batch = make_unread_batch(large + after)
            store.read_wait(batch)
            assert_read(batch, large + after)

    run(test)
    sizes = list(files_in(tmp_path).values())
    assert sizes[1] > FILE_BYTES_MIN


def test_a_large_file_is_read_at_any_offset(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = []
            for begin in range(256, 20_256, 500):
                placed += put(store, *(segment(slot, 64) for slot in range(begin, begin + 500)))
                await store.room()
            await store.sync()
            chosen = random.Random(2).sample(placed, 3_000)
            batch = make_unread_batch(chosen)
            store.read_wait(batch)
            assert_read(batch, chosen)

    run(test)
    assert sum(files_in(tmp_path).values()) > 10 * 2**20


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "log"

    async def test() -> None:
        async with opened(directory) as store:
            put(store, segment(256))

    run(test)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / log_file_name(1)).stat().st_mode & 0o777 == 0o600


def test_a_directory_with_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    async def test() -> None:
        with pytest.raises(StorageError, match=r"is no store: it has notes\.txt"):
            await open_log_store(tmp_path)

    run(test)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert files_in(tmp_path) == {}


def test_a_second_store_in_a_directory_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            await store.sync()
            with pytest.raises(StorageError, match="one writer a store"):
                await open_log_store(tmp_path)

    run(test)


# --- writing out ------------------------------------------------------------------------------------------------------


def test_what_is_put_is_written_without_being_asked(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            for slot in range(256, 260):
                put(store, segment(slot))
                await until(lambda: sum(files_in(tmp_path).values()) == store.statistics().disk_bytes)

    run(test)


def test_close_writes_what_is_left(tmp_path: Path) -> None:
    async def test() -> None:
        store = await open_log_store(tmp_path)
        put(store, segment(256))
        await store.close()
        assert sum(files_in(tmp_path).values()) == store.statistics().disk_bytes

    run(test)


def test_a_write_that_comes_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, memoryview(data)[:100], offset))

    async def test() -> None:
        async with opened(tmp_path, FILE_BYTES_MIN) as store:
            placed = [one for slot in range(256, 300) for one in put(store, segment(slot))]
            await store.sync()
            batch = make_unread_batch(placed)
            store.read_wait(batch)
            assert_read(batch, placed)

    run(test)


def test_room_bounds_what_waits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_TAIL_BYTES_MAX", 1_000)

    async def test() -> None:
        async with opened(tmp_path) as store:
            put(store, segment(256))
            await store.room()
            assert files_in(tmp_path) == {}  # below the bound nothing needs to be written
            put(store, *(segment(slot) for slot in range(257, 280)))
            await store.room()
            assert sum(files_in(tmp_path).values()) == store.statistics().disk_bytes

    run(test)


def test_syncs_at_once_all_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fdatasync = os.fdatasync

    def noted(descriptor: int) -> None:
        fdatasync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", noted)

    async def test() -> None:
        async with opened(tmp_path) as store:
            put(store, segment(256))
            await asyncio.gather(*(store.sync() for _ in range(5)))
            assert synced[-1] == store.statistics().disk_bytes

    run(test)


def test_a_cancelled_sync_harms_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def slow(descriptor: int, data: Buffer, offset: int) -> int:
        begun.set()
        go_on.wait(WAIT_MAX_S)
        return pwrite(descriptor, data, offset)

    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = put(store, segment(256))
            monkeypatch.setattr(os, "pwrite", slow)
            cancelled = asyncio.create_task(store.sync())
            await asyncio.to_thread(begun.wait)
            cancelled.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            placed += put(store, segment(257))
            await store.sync()
            batch = make_unread_batch(placed)
            store.read_wait(batch)
            assert_read(batch, placed)

    run(test)


# --- failures ---------------------------------------------------------------------------------------------------------


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def input_output_error(*_: object) -> int:
    raise OSError(5, "Input/output error")


async def assert_refuses_everything(store: LogStore) -> None:
    disk_bytes = store.statistics().disk_bytes
    with pytest.raises(StorageError, match="Input/output error"):
        put(store, segment(300))
    with pytest.raises(StorageError, match="Input/output error"):
        store.put_worker(1, "w", 0)
    with pytest.raises(StorageError, match="Input/output error"):
        store.put_worker_mark(1, 1, 1)
    with pytest.raises(StorageError, match="Input/output error"):
        store.put_namespace(1, ("t", "m", "", "", "xxh3"), 16, bytes(8))
    with pytest.raises(StorageError, match="Input/output error"):
        await store.room()
    with pytest.raises(StorageError, match="Input/output error"):
        await store.sync()
    assert store.statistics().disk_bytes == disk_bytes


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync"])
def test_a_failed_call_is_told_and_ends_all_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    async def test() -> None:
        # Each segment begins a file, whose name has to be made durable too.
        async with opened(tmp_path, file_bytes_max=64) as store:
            placed = put(store, segment(256))
            await store.sync()
            placed_later = put(store, segment(257))
            with monkeypatch.context() as patch:
                patch.setattr(os, call, input_output_error)
                with pytest.raises(StorageError, match="Input/output error"):
                    await store.sync()
            # The disk works again, but an fsync that failed once is not to be trusted a second time.
            await assert_refuses_everything(store)
            batch = make_unread_batch(placed + placed_later)
            if store.read_cached(batch):
                store.read_wait(batch)
            assert_read(batch, placed + placed_later)

    run(test)


def test_a_write_that_fails_in_the_background_is_told_to_the_next_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*_: object) -> int:
        failed.set()
        return input_output_error()

    async def test() -> None:
        async with opened(tmp_path) as store:
            monkeypatch.setattr(os, "pwrite", fail)
            put(store, segment(256))
            await asyncio.to_thread(failed.wait)
            with pytest.raises(StorageError, match="Input/output error"):
                await store.sync()
            await assert_refuses_everything(store)

    run(test)


def test_a_full_disk_refuses_what_is_new_and_goes_on_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr("sarp_cluster.limits.FULL_RETRY_MS", 1)
        async with opened(tmp_path) as store:
            placed = put(store, segment(4096))
            await store.sync()
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", no_space)
                placed_later = put(store, segment(4097))
                with pytest.raises(StoreFullError, match="No space left"):
                    await store.sync()
                with pytest.raises(StoreFullError):
                    put(store, segment(4098))
                # Nothing that was taken is lost, and all of it can be read meanwhile.
                batch = make_unread_batch(placed + placed_later)
                if store.read_cached(batch):
                    store.read_wait(batch)
                assert_read(batch, placed + placed_later)
                assert store.durable_lsn < store.lsn
            async with asyncio.timeout(10):
                while True:
                    try:
                        put(store, segment(4098))
                    except StoreFullError:
                        await asyncio.sleep(0.001)
                    else:
                        break
            await store.sync()
            assert store.durable_lsn == store.lsn

    run(test)


def test_a_file_that_is_in_the_way_fails_the_write(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            (tmp_path / log_file_name(1)).write_bytes(b"not ours")
            put(store, segment(256))
            with pytest.raises(StorageError, match="File exists"):
                await store.sync()

    run(test)
    assert (tmp_path / log_file_name(1)).read_bytes() == b"not ours"


def test_a_record_that_is_too_large_is_refused_with_all_that_came_with_it(tmp_path: Path) -> None:
    masks = [{"worker": w, "generation": 0, "tier": 0, "mask": 0x5555555555555555, "handle": w} for w in range(900)]

    async def test() -> None:
        async with opened(tmp_path) as store:
            before = store.statistics()
            batch = make_batch([segment(256), segment(257, 64) | {"runs": masks}])
            with pytest.raises(InvariantViolationError, match="512 KiB"):
                store.put(batch)
            assert store.statistics() == before
            assert all(item["image"] == 0 for item in batch.describe())

    run(test)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damage_on_disk_is_noticed_and_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = put(store, *(segment(slot) for slot in range(256, 260)))
            await store.sync()
            _, offset, length = unpack_place(placed[1]["image"])
            with (tmp_path / log_file_name(1)).open("r+b") as file:
                file.seek(offset + length // 2)
                file.write(b"\xff")
            batch = make_unread_batch(placed)
            store.read_wait(batch)
            assert [item["state"] for item in batch.describe()] == [READ, DAMAGED, READ, READ]
            assert store.statistics().damaged == 1

    run(test)


def test_what_a_cut_file_lacks_is_damage(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            placed = put(store, *(segment(slot) for slot in range(256, 260)))
            await store.sync()
            os.truncate(tmp_path / log_file_name(1), unpack_place(placed[2]["image"])[1] + 100)
            batch = make_unread_batch(placed)
            store.read_wait(batch)
            assert [item["state"] for item in batch.describe()] == [READ, READ, DAMAGED, DAMAGED]
            assert store.statistics().damaged == 2

    run(test)


def test_a_segment_without_image_and_delta_counts_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path) as store:
            (base,) = put(store, segment(256, 4))
            (whole,) = put(store, segment(256, 6) | {"image": base["image"], "image_count": 4, "write": DELTA})
            await store.sync()
            os.truncate(tmp_path / log_file_name(1), HEADER_RECORD_BYTES)
            batch = make_unread_batch([whole])
            store.read_wait(batch)
            assert [item["state"] for item in batch.describe()] == [DAMAGED]
            assert store.statistics().damaged == 1

    run(test)


# --- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_counters_are_exact(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    held: dict[int, Segment] = {}

    async def test() -> None:
        async with opened(tmp_path, FILE_BYTES_MIN) as store:
            for step in range(300):
                changes = []
                for slot in {rng.randrange(256, 290) for _ in range(rng.randint(1, 4))}:
                    known = held.get(slot)
                    blocks = min(64, (len(known["ids"]) if known else 0) + rng.randint(0 if known else 1, 6))
                    change = segment(slot, blocks)
                    if known:
                        change |= {"image": known["image"], "delta": known["delta"]}
                        change["image_count"] = known["image_blocks"]
                        change["write"] = rng.choice((IMAGE, DELTA))
                    changes.append(change)
                for placed in put(store, *changes):
                    if placed["image"] != held.get(placed["slot"], {}).get("image"):
                        placed["image_blocks"] = len(placed["ids"])
                    else:
                        placed["image_blocks"] = placed["image_count"]
                    held[placed["slot"]] = placed
                if step % 10 == 0:
                    store.put_worker_mark(0, step, step)
                live = sum(unpack_place(one[name])[2] for one in held.values() for name in ("image", "delta"))
                assert store.statistics().live_bytes == live
                if step % 50 == 0:
                    await store.sync()
                    assert sum(files_in(tmp_path).values()) == store.statistics().disk_bytes
            batch = make_unread_batch(list(held.values()))
            if store.read_cached(batch):
                store.read_wait(batch)
            assert_read(batch, list(held.values()))
            assert store.statistics().damaged == 0

    run(test)
    assert len(files_in(tmp_path)) > 5
