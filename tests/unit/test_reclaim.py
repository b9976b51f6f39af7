"""Reclaiming log files: space comes back, answers stay, whatever happens in between."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.errors import StoreFullError
from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.store_directory import log_file_name, log_files
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import Worker
from tests.churn import CONFIG, WORKERS, Churn
from tests.property.scheduling import reads_wait

RATIO_PROMISED = 1.5
WAIT_MAX_S = 20


@pytest.fixture
async def churn(tmp_path: Path) -> AsyncIterator[Churn]:
    churn = await Churn(tmp_path / "store").open()
    try:
        yield churn
    finally:
        await churn.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_MAX_S):
        while not condition():
            await asyncio.sleep(0.005)


# --- space comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_a_store_that_churns_stays_small_and_answers_right(tmp_path: Path, seed: int) -> None:
    churn = await Churn(tmp_path / "store", seed).open()
    try:
        for _ in range(6):
            await churn.change(300)
            await churn.index.drain_backfill()
            assert churn.ratio <= RATIO_PROMISED
            on_disk = sum(path.stat().st_size for path in churn.directory.glob("log-*"))
            assert on_disk <= churn.index.statistics().disk_bytes
        statistics = churn.index.statistics()
        assert statistics.reclaimed_files > 20
        assert statistics.blocked_files == 0
        await churn.check()
        await churn.reopen()
        await churn.check()
        await churn.change(300)
        await churn.index.drain_backfill()
        assert churn.ratio <= RATIO_PROMISED
        await churn.check()
    finally:
        await churn.close()
    assert await asyncio.to_thread(lambda: verify(churn.directory).clean)


async def test_background_work_does_it_by_itself(tmp_path: Path) -> None:
    churn = await Churn(tmp_path / "store").open(background=True)
    try:
        await churn.change(2_000)
        await until(lambda: churn.ratio <= RATIO_PROMISED)
        assert churn.index.statistics().reclaimed_files > 20
        await churn.check()
    finally:
        await churn.close()


async def test_a_pace_is_kept_in_the_background_alone(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, reclaim_bytes_per_second=65_536)
    churn = await Churn(tmp_path / "store", config=config).open()
    try:
        await churn.change(1_000)
        loop = asyncio.get_running_loop()
        began, steps = loop.time(), 0
        while await churn.index.background.step(now=began):
            steps += 1
        assert churn.index.background.wait_s(began) > 0  # type: ignore[operator]
        assert churn.ratio > RATIO_PROMISED
        assert await churn.index.background.step(now=began + 100)
        await churn.index.drain_backfill()  # who waits for it does not wait for its time
        assert churn.ratio <= RATIO_PROMISED
    finally:
        await churn.close()


async def test_nothing_is_reclaimed_where_that_is_switched_off(tmp_path: Path) -> None:
    churn = await Churn(tmp_path / "store", config=dataclasses.replace(CONFIG, reclaim_ratio=None)).open()
    try:
        await churn.change(1_000)
        await churn.index.drain_backfill()
        assert churn.ratio > RATIO_PROMISED
        assert churn.index.statistics().reclaimed_files == 0
        assert churn.files()[0] == log_file_name(1)
    finally:
        await churn.close()


async def test_what_the_oldest_snapshot_needs_stays(churn: Churn) -> None:
    await churn.change(500)
    needed = churn.store.position[0]
    churn.store.space.oldest_needed_file = needed
    await churn.change(500)
    await churn.index.drain_backfill()
    assert log_file_name(1) not in churn.files()
    assert {log_file_name(number) for number in range(needed, churn.store.position[0])} <= set(churn.files())
    churn.store.space.oldest_needed_file = needed + 3
    assert churn.index.background.due, "files became free, and nobody looks"
    await churn.index.drain_backfill()
    assert log_file_name(needed + 3) in churn.files()
    churn.store.space.oldest_needed_file = None
    await churn.index.drain_backfill()
    assert churn.ratio <= RATIO_PROMISED
    await churn.check()


async def test_an_idle_store_is_left_as_it_is(churn: Churn) -> None:
    await churn.change(500)
    await churn.index.drain_backfill()
    await churn.reopen()
    before = {path.name: path.read_bytes() for path in churn.directory.iterdir()}
    await churn.index.drain_backfill()
    await churn.reopen()
    assert {path.name: path.read_bytes() for path in churn.directory.iterdir()} == before


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
async def test_a_store_that_ends_between_any_two_steps_is_the_same_again(tmp_path: Path, seed: int) -> None:
    """The files as a killed process leaves them, after each step of several files' way out."""
    churn = await Churn(tmp_path / "store", seed).open()
    crashed = Churn(tmp_path / "crashed")
    crashed.reference = churn.reference
    try:
        await churn.change(400)
        await churn.store.sync()
        reclaim = churn.reclaim
        ends: dict[str, int] = {}
        while reclaim.files_reclaimed < 6:
            assert await churn.index.backfill_step()
            victim = reclaim._victim
            state = str(victim and (victim.copied, victim.recorded, victim.durable, bool(victim.slots)))
            ends[state] = ends.get(state, 0) + 1
            if ends[state] > 4:
                continue  # many steps of one kind
            shutil.copytree(churn.directory, crashed.directory)
            crashed.known = churn.known[::7]
            await crashed.open()
            await crashed.check()
            if ends[state] % 2:
                await crashed.index.drain_backfill()
                assert crashed.ratio <= RATIO_PROMISED
                await crashed.reopen()
                await crashed.check()
            await crashed.close()
            assert await asyncio.to_thread(lambda: verify(crashed.directory).clean)
            shutil.rmtree(crashed.directory)
        assert len(ends) > 4
    finally:
        await crashed.close()
        await churn.close()


async def test_a_file_that_was_recorded_as_reclaimed_is_deleted_by_recovery(churn: Churn) -> None:
    await churn.change(400)
    deleted = []

    class Stopped(Exception):
        pass

    def delete(number: int) -> None:
        deleted.append(number)
        raise Stopped

    with patch.object(churn.store.space, "delete", delete), pytest.raises(Stopped):
        await churn.index.drain_backfill()
    assert log_file_name(deleted[0]) in churn.files()
    await churn.reopen()
    assert log_file_name(deleted[0]) not in churn.files()
    await churn.check()


async def test_a_step_that_was_cancelled_is_taken_again(churn: Churn) -> None:
    await churn.change(400)
    for number in range(400):
        step = asyncio.ensure_future(churn.index.backfill_step())
        for _ in range(number % 7):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait([step])
    await churn.index.drain_backfill()
    assert churn.ratio <= RATIO_PROMISED
    await churn.check()
    await churn.reopen()
    await churn.check()


# --- what else stands in a file ---------------------------------------------------------------------------------------


async def test_namespaces_and_workers_outlive_their_files(churn: Churn) -> None:
    """None of their records is in the files that are left, but for those that were put again."""
    for round_ in range(3):
        await churn.change(400)
        await churn.index.drain_backfill()
        assert log_file_name(1 + round_) not in churn.files()
        generations = [churn.reference.generation(worker) for worker in WORKERS]
        await churn.reopen()
        workers = churn.index.state.workers
        found = [(workers.find(*worker), workers.generation(workers.find(*worker) or 0)) for worker in WORKERS]
        assert [generation for _, generation in found] == generations
        await churn.check()


async def test_a_worker_that_is_put_again_keeps_its_generation_and_seq(churn: Churn) -> None:
    """Its record is in the first file, its mark in another, which stays: the record alone would put it in 0."""
    worker = Worker("marked")
    tokens = tuple(range(100, 120))
    block_ids = chained_block_ids(tokens)
    await churn.index.insert(churn.namespaces[0], block_ids, worker=worker)
    while churn.store.position[0] < 3:
        await churn.change(1)
    mark_file = churn.store.position[0]
    await churn.index.clear_worker(worker, generation=3)
    await churn.index.insert(churn.namespaces[0], block_ids, worker=worker, generation=3, seq=77)
    while churn.store.position[0] < 8:
        await churn.change(1)
    churn.store.space.oldest_needed_file = mark_file
    await churn.index.drain_backfill()
    assert log_file_name(1) not in churn.files()
    assert log_file_name(mark_file) in churn.files()
    for _ in range(2):
        await churn.reopen()
        workers = churn.index.state.workers
        number = workers.find(*worker)
        assert number is not None
        assert (workers.generation(number), workers.seq(number)) == (3, 77)
        await churn.index.drain_backfill()


async def test_names_alone_are_not_written_again_and_again(tmp_path: Path) -> None:
    """A file with nothing but records that are in force is no dead file."""
    churn = await Churn(tmp_path / "store", config=dataclasses.replace(CONFIG, log_file_bytes=4_096)).open()
    try:
        for number in range(400):
            await churn.index.clear_worker(Worker(f"worker-{number}"), generation=1)
        for _ in range(3):
            appended = churn.store.bytes_appended
            await churn.index.drain_backfill()
            assert churn.store.bytes_appended - appended < 80_000
            appended = churn.store.bytes_appended
            await churn.index.drain_backfill()
            assert churn.store.bytes_appended == appended
            await churn.reopen()
        assert churn.index.state.workers.count == 400
    finally:
        await churn.close()


# --- reads in flight --------------------------------------------------------------------------------------------------


def open_files(directory: Path) -> set[str]:
    """What of a directory this process has open, deleted files too."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            link = os.readlink(path)
        except FileNotFoundError:
            continue  # closed meanwhile
        if link.startswith(f"{directory}/log-"):
            found.add(Path(link).name)
    return found


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_read_in_flight_keeps_its_file(churn: Churn, monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    read_wait = churn.store.read_wait

    def slow(batch: SegmentBatch) -> None:
        begun.set()
        go_on.wait(WAIT_MAX_S)
        read_wait(batch)

    await churn.change(300)
    tokens = churn.known[-1]
    expected = churn.reference.match(churn.reference_namespaces[0], chained_block_ids(tokens))
    await churn.store.sync()
    number = churn.index.state.table.describe(4096)["image"] >> 48  # type: ignore[index]
    with reads_wait(churn.index), monkeypatch.context() as context:
        context.setattr(churn.store, "read_wait", slow)
        match = asyncio.create_task(churn.index.match(churn.namespaces[0], chained_block_ids(tokens)))
        await asyncio.to_thread(begun.wait)
    await churn.change(600)
    await churn.index.drain_backfill()
    assert log_file_name(number) not in churn.files()
    held = {name for name in open_files(churn.directory) if "deleted" in name}
    assert held, "no deleted file is open: the read in flight would find nothing"
    if cancelled:
        match.cancel()
        await asyncio.wait([match])
        assert held <= open_files(churn.directory), "the thread still reads"
    go_on.set()
    if not cancelled:
        answer = await match
        assert answer.verified_blocks == expected.verified_blocks
        assert churn.store.statistics().damaged == 0
    await until(lambda: not any("deleted" in name for name in open_files(churn.directory)))
    await churn.check()


async def test_matches_and_inserts_go_on_all_the_time(tmp_path: Path) -> None:
    """Every read waits for a helper thread, files go away under them, and no answer is wrong."""
    churn = await Churn(tmp_path / "store").open(background=True)
    try:
        await churn.change(200)
        stop = False

        async def ask() -> int:
            asked = 0
            while not stop:
                tokens = churn.rng.choice(churn.known)
                answer = await churn.index.match(churn.namespaces[0], chained_block_ids(tokens), detail="blocks")
                assert answer.verified_blocks <= len(tokens)
                asked += 1
            return asked

        with reads_wait(churn.index, share=0.7):
            askers = [asyncio.create_task(ask()) for _ in range(4)]
            await churn.change(800)
            stop = True
            assert sum(await asyncio.gather(*askers)) > 100
            await churn.index.drain_backfill()
        assert churn.store.statistics().damaged == 0
        assert churn.index.statistics().reclaimed_files > 10
        await churn.check()
    finally:
        await churn.close()


# --- damage -----------------------------------------------------------------------------------------------------------


def spoil(directory: Path, number: int, begin: int, end: int | None = None) -> None:
    path = log_files(directory)[number]
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(byte ^ 0xFF for byte in data[begin:end])
    path.write_bytes(data)


async def test_a_file_with_damage_that_nothing_needs_goes(churn: Churn) -> None:
    """What stood there may have named a namespace or worker: all of them are put again."""
    await churn.change(400)
    await churn.store.sync()
    number = 3
    table = churn.index.state.table
    rows = [table.describe(slot) for slots in table.slots_in_use(1_000) for slot in slots]
    places = [place for row in rows if row for place in (row["image"], row["delta"]) if place >> 48 == number]
    begin_of_live = 8 * min((place & 0xFFFFFFFF for place in places), default=1_000)
    assert begin_of_live > 100
    await asyncio.to_thread(spoil, churn.directory, number, 0, begin_of_live)
    await churn.index.drain_backfill()
    assert log_file_name(number) not in churn.files()
    assert churn.index.statistics().blocked_files == 0
    await churn.check()
    await churn.reopen()
    await churn.check()


async def test_a_file_with_a_segment_that_cannot_be_read_stays_until_that_is_healed(churn: Churn) -> None:
    await churn.change(200)
    table, namespace = churn.index.state.table, churn.namespaces[0]
    long = chained_block_ids(range(5_000, 5_020))
    slots = table.slots_end
    await churn.index.insert(namespace, long, worker=Worker("own"))
    first = next(row for slot in range(slots, table.slots_end) if (row := table.describe(slot)) and row["children"])
    number, offset = first["image"] >> 48, (first["image"] & 0xFFFFFFFF) << 3
    await churn.change(200)
    await churn.store.sync()
    await asyncio.to_thread(spoil, churn.directory, number, offset + 40, offset + 60)
    await churn.change(400)
    async with asyncio.timeout(WAIT_MAX_S):
        await churn.index.drain_backfill()
    assert log_file_name(number) in churn.files()
    assert churn.index.statistics().blocked_files == 1
    assert churn.index.statistics().reclaimed_files > 5, "others go on"
    await churn.index.insert(namespace, long, worker=Worker("another"))
    await churn.change(400)
    async with asyncio.timeout(WAIT_MAX_S):
        await churn.index.drain_backfill()
    assert log_file_name(number) not in churn.files()
    assert churn.index.statistics().blocked_files == 0
    churn.reference.insert(churn.reference_namespaces[0], long, worker=Worker("another"))
    await churn.check()


async def test_a_leaf_that_cannot_be_read_does_not_keep_its_file(churn: Churn) -> None:
    await churn.change(200)
    table = churn.index.state.table
    slots = table.slots_end
    await churn.index.insert(churn.namespaces[0], chained_block_ids(range(5_000, 5_005)), worker=Worker("own"))
    (leaf,) = [row for slot in range(slots, table.slots_end) if (row := table.describe(slot))]
    number, offset = leaf["image"] >> 48, (leaf["image"] & 0xFFFFFFFF) << 3
    await churn.change(200)
    await churn.store.sync()
    await asyncio.to_thread(spoil, churn.directory, number, offset + 40, offset + 60)
    await churn.change(400)
    async with asyncio.timeout(WAIT_MAX_S):
        await churn.index.drain_backfill()
    assert log_file_name(number) not in churn.files()
    await churn.check()
    await churn.reopen()
    await churn.check()


# --- a full disk ------------------------------------------------------------------------------------------------------


class SmallDisk(FileSystem):
    """A disk of which others leave so much."""

    def __init__(self, total: int) -> None:
        self.total = total

    def space(self, directory: Path) -> tuple[int, int]:
        """See FileSystem."""
        used = sum(path.stat().st_size for path in directory.glob("log-*"))
        return self.total - used, self.total


async def test_a_full_disk_makes_space_by_itself(tmp_path: Path) -> None:
    churn = await Churn(tmp_path / "store").open(file_system=SmallDisk(400_000))
    try:
        with pytest.raises(StoreFullError, match="nearly no space left"):
            await churn.change(100_000)
        assert churn.store.full
        await churn.check()
        await churn.index.drain_backfill()
        await until(lambda: not churn.store.full)
        assert churn.index.statistics().reclaimed_files > 3
        await churn.change(100)
        await churn.check()
        await churn.reopen()
        await churn.check()
    finally:
        await churn.close()
