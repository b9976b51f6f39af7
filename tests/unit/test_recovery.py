"""Recovery: a store that is opened again answers as before, or is refused; damage never makes an answer wrong."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import BadRequestError, CorruptRecordError, StorageError
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.record import RecordType, frame_record, read_frame
from sarp_cluster.storage.recovery import LogStart, RecoveredLog, recover
from sarp_cluster.storage.registry import WorkerRecord
from sarp_cluster.storage.store_directory import LOCK_NAME, LOG_NAME, SECRET_NAME, SECRET_TEMPORARY_NAME, log_file_name
from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, chained_block_ids
from sarp_cluster.testing.stores import open_log_store
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker
from shard.index import Index

FRAME_BYTES = 32
FIRST_SLOT = 4096
SECRET = bytes(range(32))
CONFIG = IndexConfig(segment_blocks=8, log_file_bytes=4_096, delta_segments_max=2, reclaim_ratio=None)
SPECS = [NamespaceSpec(tenant=tenant, model="m", hash_profile=HashProfile.OPAQUE) for tenant in ("one", "two")]
WORKERS = [Worker("node-b", 0), Worker("node-b", 1), Worker("node-a", 0)]

Tokens = tuple[int, ...]


class Change(NamedTuple):
    """An insert."""

    namespace: int
    tokens: Tokens
    arguments: dict[str, Any]


class World:
    """An index and the brute-force one, to which the same happens. `states` has what is known after each insert."""

    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.reference = ReferenceIndex()
        self.reference_namespaces = [self.reference.create_namespace(spec) for spec in SPECS]
        self.changes: list[Change] = []
        self.seqs = dict.fromkeys(WORKERS, 10)
        self.generations = dict.fromkeys(WORKERS, 0)

    def draw(self) -> Change:
        rng = self.random
        worker = rng.choice(WORKERS)
        if rng.random() < 0.1:
            self.generations[worker] += 1
        known = [change.tokens for change in self.changes] or [()]
        base = rng.choice(known)
        tokens = base[: rng.randint(0, len(base))] + tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 12)))
        self.seqs[worker] += 1
        arguments = {
            "worker": worker,
            "generation": self.generations[worker],
            "tier": rng.choice(list(Tier)),
            "handle": rng.choice((None, 7)),
            "seq": rng.choice((None, self.seqs[worker])),
        }
        return Change(rng.randrange(2), tokens[:40], arguments)

    async def insert(self, index: Index, count: int, *, durable: bool = True) -> None:
        namespaces = [index.create_namespace(spec) for spec in SPECS]
        for _ in range(count):
            change = self.draw()
            block_ids = chained_block_ids(change.tokens)
            self.reference.insert(self.reference_namespaces[change.namespace], block_ids, **change.arguments)
            await index.insert(namespaces[change.namespace], block_ids, durable=durable, **change.arguments)
            self.changes.append(change)

    async def check(self, index: Index) -> None:
        """All answers, generations and seqs are the reference's."""
        assert index.statistics().blocks == self.reference.block_count()
        namespaces = [index.create_namespace(spec) for spec in SPECS]
        for change in self.changes:
            for number in range(2):
                block_ids = chained_block_ids(change.tokens)
                got = await index.match(namespaces[number], block_ids, detail="blocks")
                wanted = self.reference.match(self.reference_namespaces[number], block_ids, detail="blocks")
                assert Answer.of(got) == wanted
        for worker in WORKERS:
            number_of = index.state.workers.find(*worker)
            if number_of is not None:
                assert index.state.workers.generation(number_of) == self.reference.generation(worker)
                seq = index.state.workers.seq(number_of)
                assert (None if seq < 0 else seq) == self.reference.last_seq(worker)

    async def check_is_part(self, index: Index) -> None:
        """No block, and no holder, that the whole world does not have. Locations of generations that were to end may
        still be there, so who holds what is compared with all that was ever inserted."""
        namespaces = [index.create_namespace(spec) for spec in SPECS]
        held = {
            (change.namespace, change.tokens[: end + 1], change.arguments["worker"])
            for change in self.changes
            for end in range(len(change.tokens))
        }
        for change in self.changes:
            for number in range(2):
                answer = Answer.of(
                    await index.match(namespaces[number], chained_block_ids(change.tokens), detail="blocks")
                )
                for end, block in enumerate(answer.blocks or []):
                    assert {(number, change.tokens[: end + 1], location.worker) for location in block} <= held


def copy_store(source: Path, target: Path) -> Path:
    """What a crash at this moment leaves, with all that was written."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        if path.name != LOCK_NAME:
            shutil.copy(path, target)
    return target


async def open_index(directory: Path, secret: bytes | None = SECRET, config: IndexConfig = CONFIG) -> Index:
    return await Index.open(directory, config, secret=secret)


async def checked(directory: Path, check: Callable[[Index], Any]) -> None:
    index = await open_index(directory)
    try:
        await index.validate()
        await check(index)
    finally:
        await index.close()


def log_files(directory: Path) -> dict[int, Path]:
    """The log files by number."""
    matches = {path: LOG_NAME.fullmatch(path.name) for path in sorted(directory.iterdir())}
    return {int(match[1]): path for path, match in matches.items() if match}


def logs(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log_files(directory).values()}


def records(directory: Path) -> list[tuple[Path, int, int, int]]:
    """(file, offset, end, type) of all records."""
    found = []
    for number, path in log_files(directory).items():
        data, at = path.read_bytes(), 0
        while at < len(data):
            header = read_frame(data, at, number, at)
            assert header is not None
            end = at + (FRAME_BYTES + header.payload_bytes + 7) // 8 * 8
            found.append((path, at, end, header.type))
            at = end
    return found


async def written(directory: Path, count: int = 30, seed: int = 1) -> World:
    """A closed store of several files."""
    world = World(seed)
    index = await open_index(directory)
    await world.insert(index, count)
    await index.close()
    assert len(log_files(directory)) > 2
    return world


def recovered(directory: Path, *, cut: bool = True) -> RecoveredLog:
    """The log alone, recovered in a thread, where waiting for the disk is allowed."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(recover, directory, SegmentTable(), CONFIG.segment_blocks, cut=cut).result()


# --- opening again ----------------------------------------------------------------------------------------------------


async def test_a_closed_store_answers_as_before(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    for _ in range(3):
        index = await open_index(tmp_path / "s")
        await index.validate()
        await world.check(index)
        await world.insert(index, 10)
        await index.drain_backfill()
        await index.validate()
        await world.check(index)
        before = index.statistics()
        await index.close()
        index = await open_index(tmp_path / "s")
        await world.check(index)
        for name in ("segments", "blocks", "block_entries", "live_disk_bytes"):
            assert getattr(index.statistics(), name) == getattr(before, name)
        await index.close()


async def test_an_abandoned_store_answers_as_before(tmp_path: Path) -> None:
    world = World()
    index = await open_index(tmp_path / "s")
    for step in range(5):
        await world.insert(index, 10)
        copy_store(tmp_path / "s", tmp_path / f"crashed-{step}")
        await checked(tmp_path / f"crashed-{step}", world.check)
    await index.close()


async def test_worker_indexes_stay(tmp_path: Path) -> None:
    await written(tmp_path / "s")
    index = await open_index(tmp_path / "s")
    names = list(index.state.workers.names)
    await index.close()
    index = await open_index(tmp_path / "s")
    assert list(index.state.workers.names) == names
    await index.close()


async def test_a_store_that_is_opened_and_closed_stays_as_it_is(tmp_path: Path) -> None:
    await written(tmp_path / "s")
    before = logs(tmp_path / "s")
    for _ in range(3):
        await (await open_index(tmp_path / "s")).close()
    assert logs(tmp_path / "s") == before


async def test_a_recovered_log_goes_on_in_a_new_file(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    before = logs(tmp_path / "s")
    index = await open_index(tmp_path / "s")
    await world.insert(index, 1)
    await index.close()
    after = logs(tmp_path / "s")
    new = log_file_name(len(before) + 1)
    assert list(after) == [*before, new]
    assert {name: after[name] for name in before} == before
    header = read_frame(after[new], 0, len(before) + 1, 0)
    assert header is not None
    assert (header.type, header.incarnation) == (RecordType.FILE_HEADER, len(before) + 1)


async def test_what_is_recovered_is_synced_before_it_is_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(tmp_path / "s")
    synced = set()

    def noted(call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
            call(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", noted(os.fsync))
    monkeypatch.setattr(os, "fdatasync", noted(os.fdatasync))
    recovered(tmp_path / "s")
    assert synced == {str(tmp_path / "s"), *(str(path) for path in log_files(tmp_path / "s").values())}


async def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    await written(tmp_path / "s")
    told: list[tuple[int, int]] = []
    index = await Index.open(
        tmp_path / "s", CONFIG, secret=SECRET, progress=lambda done, total: told.append((done, total))
    )
    await index.close()
    total = sum(map(len, logs(tmp_path / "s").values()))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


async def test_a_log_store_without_segments_recovers_its_lsn(tmp_path: Path) -> None:
    store = await open_log_store(tmp_path)
    store.put_worker(0, "w", 0)
    await store.close()
    lsn = store.lsn
    store = await open_log_store(tmp_path)
    assert store.durable_lsn == lsn
    assert store.lsn == lsn + 1  # the new file's header
    await store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_the_tail_behind_any_moment_gives_the_table_of_all_that_was_inserted(tmp_path: Path, seed: int) -> None:
    """A snapshot of a moment, in the middle of a group or not, and the log behind it; background work goes on."""
    world = World(seed)
    index = await open_index(tmp_path / "s")
    await world.insert(index, world.random.randint(0, 30))
    await world.insert(index, world.random.randint(0, 3), durable=False)
    table, store = index.state.table, cast("LogStore", index.state.store)
    store.append_journal()
    begin = (table.slots_end, table.segments, table.blocks, table.block_entries, table.deltas)
    log = recovered(copy_store(tmp_path / "s", tmp_path / "known"))  # what a manifest tells of namespaces and workers
    workers = [
        WorkerRecord(number, *name, index.state.workers.generation(number), index.state.workers.seq(number))
        for number, name in enumerate(index.state.workers.names)
    ]
    start = LogStart(*store.position, store.lsn, store.statistics().live_bytes, log.namespaces, workers)
    table.freeze()
    await world.insert(index, 25)
    while table.copy_frozen(3):
        await asyncio.sleep(0)
    slots, rows = table.take_frozen()
    table.release_frozen()
    await world.insert(index, 5)
    copy_store(tmp_path / "s", tmp_path / "crashed")
    lazy = SegmentTable()
    lazy.begin_lazy(*begin)
    log = await asyncio.to_thread(recover, tmp_path / "crashed", lazy, CONFIG.segment_blocks, start=start)
    whole = SegmentTable()
    from_all = await asyncio.to_thread(recover, tmp_path / "crashed", whole, CONFIG.segment_blocks)
    lazy.install_page(0, slots, rows)
    wanted = [whole.describe(slot) for slot in range(FIRST_SLOT, whole.slots_end)]
    assert [lazy.describe(slot) for slot in range(FIRST_SLOT, whole.slots_end)] == wanted
    lazy.validate(CONFIG.segment_blocks)
    live_bytes = log.live_bytes - sum((place >> 32 & 0xFFFF) << 3 for place in lazy.take_replaced())
    assert live_bytes == from_all.live_bytes
    assert (log.lsn, log.position, log.workers) == (from_all.lsn, from_all.position, from_all.workers)
    assert {one.number for one in log.namespaces} == {one.number for one in from_all.namespaces}
    assert log.routing
    await index.close()


async def test_a_snapshot_under_way_keeps_the_log_behind_it(tmp_path: Path) -> None:
    """Its file could be reclaimed before it is published: then it would name a file that is gone."""
    world = World()
    index = await open_index(tmp_path / "s")
    await world.insert(index, 20)
    store = cast("LogStore", index.state.store)
    assert store.space.oldest_needed_file is None
    file = store.position[0]
    snapshot = asyncio.create_task(index.snapshot())
    while store.space.oldest_needed_file is None:
        await asyncio.sleep(0)
    assert (store.space.oldest_needed_file, index.snapshots.newest) == (file, None)
    await snapshot
    assert index.snapshots.newest is not None
    assert index.snapshots.newest.log_file == file
    await index.close()


# --- refusals ---------------------------------------------------------------------------------------------------------


async def refused(directory: Path, error: type[Exception], match: str, **arguments: Any) -> Exception:
    """Opening is refused and changes nothing; afterwards the store opens as ever (it is not left locked)."""
    before = logs(directory)
    with pytest.raises(error, match=match) as raised:
        await open_index(directory, **arguments)
    assert logs(directory) == before
    return raised.value


async def test_another_secret_is_refused(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    error = await refused(tmp_path / "s", BadRequestError, "secret", secret=bytes(32))
    assert isinstance(error, BadRequestError)
    assert error.field == "secret"
    await checked(tmp_path / "s", world.check)


async def test_a_log_without_its_own_secret_is_refused(tmp_path: Path) -> None:
    await (index := await open_index(tmp_path / "s", secret=None)).insert(
        index.create_namespace(SPECS[0]), chained_block_ids((1, 2)), worker=WORKERS[0]
    )
    await index.close()
    assert (tmp_path / "s" / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    await (await open_index(tmp_path / "s", secret=None)).close()
    (tmp_path / "s" / SECRET_NAME).unlink()
    await refused(tmp_path / "s", StorageError, "give the secret", secret=None)


async def test_a_secret_that_was_being_made_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / SECRET_TEMPORARY_NAME).write_bytes(b"half")
    await (await open_index(tmp_path / "s", secret=None)).close()
    assert len((tmp_path / "s" / SECRET_NAME).read_bytes()) == 32
    assert not (tmp_path / "s" / SECRET_TEMPORARY_NAME).exists()


async def test_segments_of_another_size_are_refused(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    error = await refused(
        tmp_path / "s", BadRequestError, "8 blocks a segment, not 16", config=IndexConfig(segment_blocks=16)
    )
    assert isinstance(error, BadRequestError)
    assert error.field == "segment_blocks"
    await checked(tmp_path / "s", world.check)


@pytest.mark.parametrize("version", ["4", "9", "x"])
async def test_a_newer_version_is_refused(tmp_path: Path, version: str) -> None:
    (tmp_path / "s").mkdir()
    payload = b"SARPLOG" + version.encode() + struct.pack("<II", CONFIG.segment_blocks, 0)
    header = frame_record(RecordType.FILE_HEADER, payload, 1, 1, 0, 1)
    (tmp_path / "s" / log_file_name(1)).write_bytes(header + b"what this program does not know")
    await refused(tmp_path / "s", StorageError, "newer program")


async def test_a_record_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    await written(tmp_path / "s")
    number, path = list(log_files(tmp_path / "s").items())[-1]
    data = path.read_bytes()
    lsn = recovered(tmp_path / "s").lsn
    unknown = frame_record(77, b"", lsn + 1, number, len(data), 1)
    group = frame_record(RecordType.GROUP, bytes(8), lsn + 2, number, len(data) + len(unknown), 1)
    path.write_bytes(data + unknown + group)
    await refused(tmp_path / "s", StorageError, "type 77")


async def test_another_file_in_the_directory_is_refused(tmp_path: Path) -> None:
    await written(tmp_path / "s")
    (tmp_path / "s" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"no store: it has notes\.txt"):
        await open_index(tmp_path / "s")
    assert (tmp_path / "s" / "notes.txt").read_text() == "mine"


HOLDER = """
import asyncio, sys
from pathlib import Path
from shard.index import Index

async def main():
    index = await Index.open(Path(sys.argv[1]), secret=bytes(32))
    print("open", flush=True)
    sys.stdin.read()
    await index.close()

asyncio.run(main())
"""


async def test_a_store_that_another_process_has_open_is_refused(tmp_path: Path) -> None:
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", HOLDER, str(tmp_path / "s")],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "open\n"
        with pytest.raises(StorageError, match="open in another process"):
            await Index.open(tmp_path / "s", secret=bytes(32))
        await asyncio.to_thread(process.kill)  # the lock goes with the process
        await asyncio.to_thread(process.wait)
        await (await Index.open(tmp_path / "s", secret=bytes(32))).close()


# --- torn tails -------------------------------------------------------------------------------------------------------


async def test_the_log_cut_at_every_byte_of_its_last_records(tmp_path: Path) -> None:
    world = World()
    index = await open_index(tmp_path / "s")
    await world.insert(index, 25)
    await index.close()
    acknowledged = len(world.changes)
    index = await open_index(tmp_path / "s")
    await world.insert(index, 2)
    await index.close()
    path = list(log_files(tmp_path / "s").values())[-1]
    starts = [at for file, at, _, _ in records(tmp_path / "s") if file == path]
    ends = [0, *(end for file, _, end, kind in records(tmp_path / "s") if file == path and kind == RecordType.GROUP)]
    old = World()
    old.changes = world.changes[:acknowledged]
    for change in old.changes:
        old.reference.insert(
            old.reference_namespaces[change.namespace], chained_block_ids(change.tokens), **change.arguments
        )
    size = path.stat().st_size
    crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
    for length in range(size - 1, ends[-3], -1):
        os.truncate(crashed / path.name, length)
        assert (recovered(crashed, cut=False).cut is None) == (length in ends)
    for length in sorted({at + more for at in starts for more in (-1, 0, 1, 40)} & set(range(ends[-3], size))):
        copy_store(tmp_path / "s", crashed)
        os.truncate(crashed / path.name, length)
        index = await open_index(crashed)
        await index.validate()
        await world.check_is_part(index)
        assert old.reference.block_count() <= index.statistics().blocks <= world.reference.block_count()
        namespaces = [index.create_namespace(spec) for spec in SPECS]
        for change in old.changes:
            answer = await index.match(namespaces[change.namespace], chained_block_ids(change.tokens))
            assert answer.verified_blocks == len(change.tokens)
        await index.close()
        after = logs(crashed)
        assert len(after.get(path.name, b"")) == max(end for end in ends if end <= length)
        assert recovered(crashed).cut is None
        assert logs(crashed) == after


async def test_a_cut_store_takes_inserts_again(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    path = list(log_files(tmp_path / "s").values())[-1]
    data = path.read_bytes()
    for rubbish in (b"\0" * 8, b"\0" * 5_000, b"rubbish", data[:400]):
        path.write_bytes(data + rubbish)
        index = await open_index(tmp_path / "s")
        await world.check(index)
        assert path.read_bytes() == data
        await world.insert(index, 3)
        await index.close()
        await checked(tmp_path / "s", world.check)
        path = list(log_files(tmp_path / "s").values())[-1]
        data = path.read_bytes()


async def test_an_empty_last_file_is_removed(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    path = tmp_path / "s" / log_file_name(len(log_files(tmp_path / "s")) + 1)
    path.touch()
    await checked(tmp_path / "s", world.check)
    assert not path.exists()


# --- damage -----------------------------------------------------------------------------------------------------------


async def test_each_byte_of_a_record_in_the_middle(tmp_path: Path) -> None:
    """What later groups vouch for is damage, named by file and offset."""
    world = await written(tmp_path / "s")
    middle = list(log_files(tmp_path / "s").values())[1]
    at, end = next((at, end) for path, at, end, kind in records(tmp_path / "s") if path == middle and kind == 1)
    data = middle.read_bytes()
    before = logs(tmp_path / "s")
    for offset in range(at, end):
        damaged = bytearray(data)
        damaged[offset] ^= 0x40
        middle.write_bytes(damaged)
        with pytest.raises(CorruptRecordError, match=f"{middle.name}: the record at offset {at} "):
            recovered(tmp_path / "s")
    middle.write_bytes(data)
    assert logs(tmp_path / "s") == before
    await checked(tmp_path / "s", world.check)


async def assert_refused_or_shorter(directory: Path, world: World) -> bool:
    """Opens with part of what it had, or is refused cleanly. Was it refused?"""
    try:
        index = await open_index(directory)
    except StorageError:
        return True
    try:
        await index.validate()
        await world.check_is_part(index)
    finally:
        await index.close()
    return False


async def test_each_record_damaged(tmp_path: Path) -> None:
    """Damage that something vouches for is refused; what nothing vouches for is cut off."""
    world = await written(tmp_path / "s")
    refusals = []
    for path, at, end, _ in records(tmp_path / "s"):
        crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
        data = bytearray(path.read_bytes())
        data[world.random.randrange(at, min(end, at + FRAME_BYTES))] ^= 1 << world.random.randrange(8)
        (crashed / path.name).write_bytes(data)
        refusals.append(await assert_refused_or_shorter(crashed, world))
    cuts = refusals.count(False)
    assert 0 < cuts < 12
    assert not any(refusals[-cuts:])  # only at the end


async def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    await written(tmp_path / "s")
    numbers = list(log_files(tmp_path / "s"))
    for number in numbers[:-1]:
        crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
        (crashed / log_file_name(number)).unlink()
        await refused(crashed, CorruptRecordError, f"{log_file_name(number)} is missing")


async def test_files_that_are_swapped_are_refused_or_cut(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    numbers = list(log_files(tmp_path / "s"))
    for first in numbers:
        for second in numbers[first:]:
            crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
            one, other = crashed / log_file_name(first), crashed / log_file_name(second)
            one.rename(crashed / "x")
            other.rename(one)
            (crashed / "x").rename(other)
            was_refused = await assert_refused_or_shorter(crashed, world)
            if second != numbers[-1]:
                assert was_refused


async def test_a_file_that_is_there_twice_changes_nothing(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    numbers = list(log_files(tmp_path / "s"))
    for number in numbers:
        crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
        shutil.copy(crashed / log_file_name(number), crashed / log_file_name(numbers[-1] + 1))
        await checked(crashed, world.check)
        assert list(log_files(crashed)) == numbers


async def test_anything_overwritten_is_refused_or_cut(tmp_path: Path) -> None:
    world = await written(tmp_path / "s")
    rng = random.Random(5)
    for _ in range(60):
        crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
        path = rng.choice(list(log_files(crashed).values()))
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        length = rng.choice((1, 8, 100, 4_096))
        data[at : at + length] = rng.choice((bytes(length), rng.randbytes(length), data[:length], b""))
        path.write_bytes(data)
        await assert_refused_or_shorter(crashed, world)


# --- recovery itself is interrupted -----------------------------------------------------------------------------------


class InterruptedRecoveryError(Exception):
    """The process ends here."""


async def test_recovery_that_is_interrupted_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail begins in the middle of a file, two more follow: each step of the cut is the last one once."""
    world = await written(tmp_path / "s")
    path = list(log_files(tmp_path / "s").values())[-1]
    with path.open("ab") as file:
        file.write(b"torn")
    last = len(log_files(tmp_path / "s"))
    for number in (last + 1, last + 2):
        shutil.copy(path, tmp_path / "s" / log_file_name(number))
    copy_store(tmp_path / "s", tmp_path / "whole")
    recovered(tmp_path / "whole")
    wanted = logs(tmp_path / "whole")
    left = 0

    def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise InterruptedRecoveryError
            return call(*arguments, **options)

        return step

    steps, crashed = 0, tmp_path / "crashed"
    for steps in range(100):
        copy_store(tmp_path / "s", crashed)
        left = steps
        with monkeypatch.context() as patch, suppress(InterruptedRecoveryError):
            for name in ("ftruncate", "rename", "fsync", "fdatasync"):
                patch.setattr(os, name, interrupted(getattr(os, name)))
            recovered(crashed)
        recovered(crashed)
        assert logs(crashed) == wanted
        if left >= 0:
            break
    assert steps >= 5
    await checked(crashed, world.check)
