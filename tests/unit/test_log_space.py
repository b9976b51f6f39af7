"""The log's files: what their headers name, what goes into a group, what is counted, and how one is deleted."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import InvariantViolationError, StorageError
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.log_files import LogFiles
from sarp_cluster.storage.record import RecordType, read_frame
from sarp_cluster.storage.store_directory import log_file_name, log_files
from sarp_cluster.testing.segments import make_batch
from sarp_cluster.testing.stores import open_log_store
from tests.churn import Churn

FILE_BYTES = 4_096
FRAME_BYTES = 32


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LogStore]:
    store = await open_log_store(tmp_path / "store", file_bytes_max=FILE_BYTES)
    try:
        yield store
    finally:
        await store.close()


def segment(slot: int) -> dict[str, Any]:
    return {"slot": slot, "tag": 0, "window": 0, "ids": [slot << 32 | block for block in range(8)], "runs": []}


def put(store: LogStore, *slots: int) -> None:
    store.put(make_batch([segment(slot) for slot in slots]))


async def records(store: LogStore, directory: Path) -> dict[int, list[tuple[int, bytes]]]:
    """(type, payload) of all records that are written, by file."""
    await store.sync()
    return await asyncio.to_thread(read_records, directory)


def read_records(directory: Path) -> dict[int, list[tuple[int, bytes]]]:
    found: dict[int, list[tuple[int, bytes]]] = {}
    for number, path in log_files(directory).items():
        data, at = path.read_bytes(), 0
        found[number] = []
        while at < len(data):
            header = read_frame(data, at, number, at)
            assert header is not None
            begin = at + FRAME_BYTES
            found[number].append((header.type, data[begin : begin + header.payload_bytes]))
            at += (FRAME_BYTES + header.payload_bytes + 7) // 8 * 8
    return found


def named(header: tuple[int, bytes]) -> list[int]:
    kind, payload = header
    assert kind == RecordType.FILE_HEADER
    assert payload[:8] == b"SARPLOG3"
    (count,) = struct.unpack_from("<I", payload, 12)
    assert len(payload) == 16 + 2 * count
    return list(struct.unpack_from(f"<{count}H", payload, 16))


# --- headers ----------------------------------------------------------------------------------------------------------


async def test_a_header_names_the_older_files_but_for_those_that_are_reclaimed(tmp_path: Path, store: LogStore) -> None:
    for slot in range(4096, 4160):
        put(store, slot)
    await store.sync()
    assert store.position[0] > 2
    reclaimed_in = store.position[0]
    store.put_reclaimed(2)
    await store.sync()
    await store.remove_file(2)
    for slot in range(4160, 4200):
        put(store, slot)
    found = await records(store, tmp_path / "store")
    assert 2 not in found
    for number, (header, *_) in found.items():
        older = set(range(1, number)) - ({2} if number > reclaimed_in else set())
        assert named(header) == sorted(older)
    assert (RecordType.RECLAIMED, struct.pack("<I", 2)) in found[reclaimed_in]


async def test_a_file_is_closed_early_only_if_there_is_something_in_it(store: LogStore) -> None:
    store.next_file()
    assert store.position[0] == 1
    put(store, 4096)
    store.next_file()
    assert store.position[0] == 2
    store.next_file()
    assert store.position[0] == 2


async def test_a_deleted_file_no_longer_counts(tmp_path: Path, store: LogStore) -> None:
    for slot in range(4096, 4160):
        put(store, slot)
    await store.sync()
    before, size = store.statistics().disk_bytes, (tmp_path / "store" / log_file_name(1)).stat().st_size
    store.put_reclaimed(1)
    await store.sync()
    grown = store.statistics().disk_bytes
    await store.remove_file(1)
    await store.remove_file(1)  # nothing happens
    assert store.statistics().disk_bytes == grown - size
    assert grown > before
    assert store.statistics().disk_bytes == sum(path.stat().st_size for path in (tmp_path / "store").glob("log-*"))


# --- groups and the journal -------------------------------------------------------------------------------------------


async def test_what_the_journal_has_goes_into_the_group_that_ends(tmp_path: Path, store: LogStore) -> None:
    pieces: list[bytes] = []

    def journal() -> list[bytes]:
        taken = pieces[:]
        pieces.clear()
        return taken

    store.journal = journal
    assert store.journal is journal
    put(store, 4096)
    pieces += [b"first", b"second"]
    await store.sync()
    put(store, 4097)
    pieces.append(b"third")
    lsn, position = store.lsn, store.position
    store.append_journal()
    assert store.lsn == lsn + 1
    assert store.position > position
    assert not pieces
    put(store, 4098)
    found = (await records(store, tmp_path / "store"))[1]
    image, group, routing = RecordType.IMAGE, RecordType.GROUP, RecordType.ROUTING
    assert [kind for kind, _ in found[1:]] == [image, routing, routing, group, image, routing, image, group]
    assert [payload for kind, payload in found if kind == routing] == [b"first", b"second", b"third"]


async def test_every_group_ends_with_its_record_also_over_files(tmp_path: Path, store: LogStore) -> None:
    rng = random.Random(1)
    store.journal = lambda: [rng.randbytes(rng.randrange(900)) for _ in range(rng.randrange(3))]
    for slot in range(4096, 4200):
        put(store, slot)
        if rng.random() < 0.2:
            await store.sync()
    await store.close()
    found = await asyncio.to_thread(read_records, tmp_path / "store")
    kinds = [kind for number in sorted(found) for kind, _ in found[number]]
    assert kinds[-1] == RecordType.GROUP
    assert kinds.count(RecordType.GROUP) > 10
    assert len(found) > 3


async def test_a_record_that_reclaiming_could_not_look_through_is_refused(store: LogStore) -> None:
    store.journal = lambda: [bytes(600_000)]
    put(store, 4096)
    with pytest.raises(InvariantViolationError, match="512 KiB"):
        store.append_journal()
    store.journal = None


# --- books ------------------------------------------------------------------------------------------------------------


async def test_live_bytes_are_counted_in_slices_while_segments_change(tmp_path: Path) -> None:
    """A segment before the hand is kept exact, one behind it is counted as the hand finds it: validate() compares."""
    for rows in (1, 7, 64):
        churn = await Churn(tmp_path / str(rows)).open()
        try:
            await churn.change(300)
            await churn.reopen()
            files = churn.store.space.files
            assert not files.counted
            while not files.count(churn.index.state.table, rows):
                await churn.change(1)
            assert files.counted
            await churn.index.validate()
            await churn.change(50)
            await churn.index.validate()
        finally:
            await churn.close()


def test_a_new_store_is_counted_at_once() -> None:
    files = LogFiles()
    assert not files.counted
    assert files.count(SegmentTable(), 1)
    assert files.counted
    assert files.live_bytes == 0


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_file_that_cannot_be_deleted_poisons_the_store(tmp_path: Path, store: LogStore) -> None:
    """Whether the directory has it or not is not known any more."""
    for slot in range(4096, 4160):
        put(store, slot)
    store.put_reclaimed(1)
    await store.sync()
    (tmp_path / "store" / log_file_name(1)).unlink()
    with pytest.raises(StorageError, match="could not be deleted"):
        await store.remove_file(1)
    with pytest.raises(StorageError, match="recover from the disk"):
        put(store, 4200)
