"""Replaying crafted logs: groups, files that are missing, and the tail behind a snapshot."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, StorageError
from sarp_cluster.storage.log_files import LogFiles
from sarp_cluster.storage.log_replay import LogReplay
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.record import RecordType
from sarp_cluster.storage.recovery import LogStart, RecoveredLog, header_prefix, recover
from sarp_cluster.storage.registry import pack_namespace, pack_worker, pack_worker_mark
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.segments import make_batch

FIRST_SLOT = 4096
SIZE = 4
DELTA = 2
FAR = FIRST_SLOT + 300_000
RUN = {"worker": 0, "generation": 0, "tier": 0, "mask": 1, "handle": None}


class Log:
    """A log as a store writes it, group by group."""

    def __init__(self, directory: Path, file_bytes_max: int = 1 << 20) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.tail = LogTail(file_bytes_max, 1, 1, 0, header_prefix(SIZE), LogFiles())
        self.durable_lsn = 0

    def segments(self, *segments: dict[str, Any]) -> None:
        self.tail.append_segments(make_batch([{"ids": [7] * SIZE, "runs": [RUN], **one} for one in segments]))

    def registry(self) -> None:
        self.tail.append_record(RecordType.NAMESPACE, pack_namespace(1, ("t", "m", "", "", "opaque"), 16, bytes(8)))
        self.tail.append_record(RecordType.WORKER, pack_worker(0, "w", 0))

    def group(self, *, durable: bool = True) -> None:
        """End the group, and write it. `durable`: the next one will vouch for it."""
        for number, offset, data in self.tail.begin_write(self.durable_lsn):
            path = self.directory / log_file_name(number)
            path.touch()
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(data)
        self.tail.end_write()
        if durable:
            self.durable_lsn = self.tail.lsn

    def next_file(self) -> None:
        self.tail.next_file()

    def reclaim(self, number: int, *, unlink: bool = True) -> None:
        self.tail.append_record(RecordType.RECLAIMED, struct.pack("<I", number))
        self.tail.files.unlist(number)
        self.group()
        if unlink:
            self.path(number).unlink()

    def path(self, number: int) -> Path:
        return self.directory / log_file_name(number)

    @property
    def start(self) -> LogStart:
        """A snapshot of this moment."""
        return LogStart(self.tail.file, self.tail.offset, self.tail.lsn, 0, (), ())


def rebuilt(directory: Path, *, cut: bool = True) -> tuple[SegmentTable, RecoveredLog]:
    table = SegmentTable()
    return table, recover(directory, table, SIZE, cut=cut)


def slots(table: SegmentTable) -> list[int]:
    return [slot for some in table.slots_in_use(100) for slot in some]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_is_replayed_whole_or_not_at_all(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.segments({"slot": FIRST_SLOT})
    log.group()
    end, lsn = log.tail.offset, log.tail.lsn
    log.segments({"slot": FIRST_SLOT + 1}, {"slot": FIRST_SLOT + 2})
    log.tail.append_record(RecordType.WORKER, pack_worker(0, "w", 0))
    log.group()
    data = log.path(1).read_bytes()
    for length in range(end, len(data)):
        log.path(1).write_bytes(data[:length])
        table, found = rebuilt(tmp_path, cut=False)
        assert (slots(table), found.lsn, found.position) == ([FIRST_SLOT], lsn, (1, end))
        assert (found.workers, found.cut is None) == ([], length == end)
    log.path(1).write_bytes(data)
    table, found = rebuilt(tmp_path, cut=False)
    assert (table.segments, found.position, found.cut) == (3, (1, len(data)), None)


def test_a_group_over_several_files_is_cut_where_it_begins(tmp_path: Path) -> None:
    log = Log(tmp_path, file_bytes_max=400)
    log.segments({"slot": FIRST_SLOT})
    log.group()
    file, end = log.tail.file, log.tail.offset
    for number in range(1, 9):
        log.segments({"slot": FIRST_SLOT + number})
    log.group()
    last = log.tail.file
    assert last > file + 2
    whole = contents(tmp_path)
    log.path(last).write_bytes(whole[log_file_name(last)][:-1])
    table, found = rebuilt(tmp_path)
    assert (slots(table), found.position, list(found.files)) == ([FIRST_SLOT], (file, end), [file])
    assert log.path(file).stat().st_size == end
    left = contents(tmp_path)
    assert left[f"cut-00001-{end}.sarp"] == whole[log_file_name(1)][end:]
    assert left[f"cut-{last - 1:05d}-0.sarp"] == whole[log_file_name(last - 1)]
    assert rebuilt(tmp_path)[1].cut is None
    assert contents(tmp_path) == left


@pytest.mark.parametrize("durable", [True, False])
def test_a_group_without_its_end_is_damage_if_something_vouches_for_it(tmp_path: Path, durable: bool) -> None:
    log = Log(tmp_path)
    log.segments({"slot": FIRST_SLOT})
    log.group()
    log.segments({"slot": FIRST_SLOT + 1})
    log.group(durable=durable)
    end = log.tail.offset
    log.next_file()
    log.segments({"slot": FIRST_SLOT + 2})
    log.group()
    with log.path(1).open("r+b") as file:
        file.truncate(end - 40)  # the group's end is gone, all else is there
    if durable:
        with pytest.raises(CorruptRecordError, match=r"log-00002\.sarp: the record at offset 0 "):
            rebuilt(tmp_path)
    else:
        table, found = rebuilt(tmp_path)
        assert slots(table) == [FIRST_SLOT]
        assert list(found.files) == [1]
        assert (tmp_path / "cut-00002-0.sarp").exists()


def test_a_whole_group_that_cannot_be_is_damage(tmp_path: Path) -> None:
    """It was written as it stands: what it builds on is gone."""
    log = Log(tmp_path)
    log.segments({"slot": FIRST_SLOT})
    log.group()
    at = log.tail.offset
    log.segments({"slot": FIRST_SLOT + 9, "write": DELTA, "image_count": SIZE})
    log.group()
    before = contents(tmp_path)
    with pytest.raises(CorruptRecordError, match=f"offset {at} .*makes no sense"):
        rebuilt(tmp_path)
    assert contents(tmp_path) == before
    assert [(finding.offset, finding.harmless) for finding in verify(tmp_path).findings] == [(at, False)]


def test_records_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path)
    for number in range(9):
        log.segments({"slot": FIRST_SLOT + number})
        if number % 4 == 1:
            log.group()
    log.group()
    for length in (40, 100, 160, 256, 1_000):
        monkeypatch.setattr("sarp_cluster.storage.recovery.PIECE_BYTES", length)
        table, found = rebuilt(tmp_path)
        assert (table.segments, found.lsn, found.cut) == (9, log.tail.lsn, None)
        assert found.replayed_bytes == found.disk_bytes


# --- files that are missing -------------------------------------------------------------------------------------------


def reclaimed_log(directory: Path, *, unlink: bool = True) -> Log:
    """A record in file 3 says that file 1 is reclaimed. File 2 has what was needed of it, and a delta of its image."""
    far = FAR if unlink else FIRST_SLOT + 2  # slots are given in order, so such a one needs many segments before it
    log = Log(directory)
    log.registry()
    log.tail.append_record(RecordType.WORKER_MARK, pack_worker_mark(0, 3, 5))
    log.segments({"slot": FIRST_SLOT + 1}, {"slot": far})
    log.group()
    log.next_file()
    log.tail.append_record(RecordType.WORKER_MARK, pack_worker_mark(0, 4, 6))
    log.segments({"slot": FIRST_SLOT + 1, "write": DELTA, "image_count": SIZE, "image": 8, "count_before": SIZE})
    log.segments({"slot": FIRST_SLOT + 1, "count_before": SIZE}, {"slot": far, "count_before": SIZE})
    log.registry()
    log.tail.append_record(RecordType.WORKER_MARK, pack_worker_mark(0, 4, 6))
    log.group()
    log.next_file()
    log.reclaim(1, unlink=unlink)
    return log


@pytest.mark.parametrize("next_file", [False, True])
def test_a_file_that_was_reclaimed_is_not_missed(tmp_path: Path, next_file: bool) -> None:
    """While the newest header names it, a record says so; then the header does not name it."""
    log = reclaimed_log(tmp_path)
    if next_file:
        log.next_file()
        log.group()
    table, found = rebuilt(tmp_path)
    assert (slots(table), found.lsn, found.cut) == ([FIRST_SLOT + 1, FAR], log.tail.lsn, None)
    assert [(worker.instance_id, worker.generation, worker.seq) for worker in found.workers] == [("w", 4, 6)]
    assert [namespace.number for namespace in found.namespaces] == [1]
    assert not verify(tmp_path).findings


def test_a_reclaimed_file_that_is_still_there_is_removed(tmp_path: Path) -> None:
    reclaimed_log(tmp_path, unlink=False)
    table, found = rebuilt(tmp_path, cut=False)
    assert list(found.files) == [1, 2, 3]
    table, found = rebuilt(tmp_path)
    assert list(found.files) == [2, 3]
    assert not (tmp_path / log_file_name(1)).exists()
    assert slots(table) == [FIRST_SLOT + 1, FIRST_SLOT + 2]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_file_that_was_not_reclaimed_is_missed(tmp_path: Path, lost: int) -> None:
    log = Log(tmp_path)
    for number in range(4):
        log.segments({"slot": FIRST_SLOT + number})
        log.group()
        log.next_file()
    log.group()
    log.path(lost).unlink()
    before = contents(tmp_path)
    with pytest.raises(CorruptRecordError, match=rf"{log_file_name(lost)} is missing"):
        rebuilt(tmp_path)
    assert contents(tmp_path) == before
    assert [(finding.file, finding.what) for finding in verify(tmp_path).findings][:1] == [
        (log_file_name(lost), "is missing")
    ]


def test_a_file_that_never_reached_the_disk_is_a_torn_tail(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.segments({"slot": FIRST_SLOT})
    log.group()
    for number in (1, 2):
        log.next_file()
        log.segments({"slot": FIRST_SLOT + number})
        log.group(durable=False)
    log.path(2).unlink()
    table, found = rebuilt(tmp_path)
    assert (slots(table), list(found.files)) == ([FIRST_SLOT], [1])
    assert (tmp_path / "cut-00003-0.sarp").exists()


def test_a_delta_whose_image_is_nowhere_is_damage(tmp_path: Path) -> None:
    """Only an image behind it makes a delta sound whose own image was reclaimed."""
    log = Log(tmp_path)
    log.segments({"slot": FIRST_SLOT})
    log.group()
    log.next_file()
    log.segments({"slot": FIRST_SLOT, "write": DELTA, "image_count": SIZE, "image": 8, "count_before": SIZE})
    log.group()
    log.reclaim(1)
    with pytest.raises(CorruptRecordError, match=f"segment {FIRST_SLOT} has changes"):
        rebuilt(tmp_path)
    assert f"segment {FIRST_SLOT} has changes" in verify(tmp_path).findings[0].what


def test_a_log_of_version_1_has_all_its_files(tmp_path: Path) -> None:
    log = Log(tmp_path)
    files = 3
    for number in range(1, files + 1):
        prefix = b"SARPLOG1" + struct.pack("<I", SIZE)
        log.tail = LogTail(1 << 20, number, number, log.durable_lsn, prefix, OneFile())
        log.segments({"slot": FIRST_SLOT + number})
        log.group()
    table, found = rebuilt(tmp_path)
    assert (table.segments, found.cut) == (files, None)
    log.path(2).unlink()
    with pytest.raises(CorruptRecordError, match=r"log-00002\.sarp is missing"):
        rebuilt(tmp_path)


class OneFile(LogFiles):
    """Names no older files, as headers of version 1."""

    def names(self) -> bytes:
        return bytes(4)


# --- the tail behind a snapshot ---------------------------------------------------------------------------------------


class Snapshotted:
    """A log with a snapshot in the middle of it, even of a group."""

    def __init__(self, directory: Path, *, files: bool) -> None:
        log = self.log = Log(directory, file_bytes_max=600)
        self.rows = {}
        log.registry()
        log.segments({"slot": FIRST_SLOT}, {"slot": FIRST_SLOT + 2_000, "ids": [1] * 2})
        log.group()
        log.segments({"slot": FIRST_SLOT + 1, "window": 1, "parent": FIRST_SLOT})
        table = SegmentTable()
        log.group()
        recover(directory, table, SIZE, cut=False)
        self.begin = (table.slots_end, table.segments, table.blocks, table.block_entries, table.deltas)
        table.freeze()
        table.copy_frozen(100)
        frozen_slots, frozen = table.take_frozen()
        self.rows = {slot: bytes(frozen[40 * at : 40 * at + 40]) for at, slot in enumerate(frozen_slots)}
        log.tail.append_record(RecordType.WORKER_MARK, pack_worker_mark(0, 1, 1))
        self.start = log.start._replace(
            live_bytes=rebuilt(directory)[1].live_bytes,
            namespaces=rebuilt(directory)[1].namespaces,
            workers=[worker._replace(generation=1, seq=1) for worker in rebuilt(directory)[1].workers],
            files=frozenset(range(1, log.tail.file + 1)) if files else None,
        )
        log.segments({"slot": FIRST_SLOT + 2, "window": 1, "parent": FIRST_SLOT})  # in the group of the snapshot
        log.tail.append_record(RecordType.ROUTING, b"first")
        log.group()
        log.segments(
            {
                "slot": FIRST_SLOT + 2_000,
                "ids": [1] * 3,
                "write": DELTA,
                "image_count": 2,
                "count_before": 2,
                "image": 8,
            }
        )
        log.segments({"slot": FIRST_SLOT + 2_001, "origin": FIRST_SLOT, "fork": 1, "ids": [7, 8]})
        log.tail.append_record(RecordType.WORKER_MARK, pack_worker_mark(0, 2, 9))
        log.tail.append_record(RecordType.WORKER, pack_worker(1, "x", 3))
        log.tail.append_record(RecordType.ROUTING, b"second")
        log.group()
        log.segments({"slot": FIRST_SLOT + 2_000, "ids": [1] * SIZE, "count_before": 3, "image": 8, "delta": 16})
        log.group()

    def recover(self, *, start: LogStart | None = None) -> tuple[SegmentTable, RecoveredLog]:
        table = SegmentTable()
        table.begin_lazy(*self.begin)
        return table, recover(self.log.directory, table, SIZE, start=start or self.start)

    def load(self, table: SegmentTable) -> None:
        while (page := table.next_unloaded(0)) >= 0:
            begin = FIRST_SLOT + 1_024 * page
            found = array("I", [slot for slot in sorted(self.rows) if begin <= slot < begin + 1_024])
            table.install_page(page, found, b"".join(self.rows[slot] for slot in found))


@pytest.mark.parametrize("files", [False, True])
def test_a_tail_gives_the_table_of_the_whole_log(tmp_path: Path, files: bool) -> None:
    world = Snapshotted(tmp_path, files=files)
    whole, from_all = rebuilt(tmp_path)
    table, found = world.recover()
    names = ("segments", "blocks", "block_entries", "deltas", "slots_end")
    assert [getattr(table, name) for name in names] == [getattr(whole, name) for name in names]
    assert table.unloaded_pages == 2
    world.load(table)
    assert slots(table) == slots(whole)
    assert [table.describe(slot) for slot in slots(table)] == [whole.describe(slot) for slot in slots(whole)]
    table.validate(SIZE)
    assert found.live_bytes - sum((place >> 32 & 0xFFFF) << 3 for place in table.take_replaced()) == from_all.live_bytes
    assert (found.namespaces, found.workers) == (from_all.namespaces, from_all.workers)
    assert (found.lsn, found.position, found.files) == (from_all.lsn, from_all.position, from_all.files)
    assert found.routing == [b"first", b"second"]
    assert from_all.routing == []
    assert found.replayed_bytes < from_all.replayed_bytes


def test_a_tail_that_is_torn_ends_with_its_last_whole_group(tmp_path: Path) -> None:
    world = Snapshotted(tmp_path, files=True)
    last = max(world.log.tail.files.listed)
    world.log.path(last).write_bytes(world.log.path(last).read_bytes()[:-8])
    whole, from_all = rebuilt(tmp_path, cut=False)
    table, found = world.recover()
    assert (found.lsn, found.position) == (from_all.lsn, from_all.position)
    assert found.cut == from_all.cut is not None
    assert (table.segments, table.blocks) == (whole.segments, whole.blocks)
    assert world.recover()[1].cut is None


def test_damage_in_a_tail_is_refused(tmp_path: Path) -> None:
    world = Snapshotted(tmp_path, files=True)
    path = world.log.path(world.start.file)
    data = bytearray(path.read_bytes())
    data[world.start.offset + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError, match=f"{path.name}: the record at offset {world.start.offset} "):
        world.recover()


def test_what_is_before_a_snapshot_is_not_read(tmp_path: Path) -> None:
    world = Snapshotted(tmp_path, files=True)
    path = world.log.path(1)
    assert world.start.file > 1
    path.write_bytes(bytes(path.stat().st_size))
    assert world.recover()[1].cut is None


@pytest.mark.parametrize("files", [False, True])
def test_a_file_that_is_missing_before_a_snapshot_is_named(tmp_path: Path, files: bool) -> None:
    world = Snapshotted(tmp_path, files=files)
    world.log.path(1).unlink()
    with pytest.raises(CorruptRecordError, match=r"log-00001\.sarp is missing"):
        world.recover()


@pytest.mark.parametrize("files", [False, True])
def test_a_file_may_have_been_reclaimed_after_a_snapshot(tmp_path: Path, files: bool) -> None:
    world = Snapshotted(tmp_path, files=files)
    world.log.segments({"slot": FIRST_SLOT, "count_before": SIZE})
    world.log.group()
    world.log.reclaim(1)
    assert 1 not in world.recover()[1].files


def test_a_log_that_ends_before_its_snapshot_is_refused(tmp_path: Path) -> None:
    world = Snapshotted(tmp_path, files=True)
    path = world.log.path(world.start.file)
    path.write_bytes(path.read_bytes()[: world.start.offset - 8])
    for later in range(world.start.file + 1, world.log.tail.file + 1):
        world.log.path(later).unlink()
    with pytest.raises(CorruptRecordError, match="ends before the snapshot does"):
        world.recover()
    path.unlink()
    with pytest.raises(CorruptRecordError, match="ends before the snapshot does"):
        world.recover()


def test_a_tail_that_does_not_fit_what_is_loaded_is_refused(tmp_path: Path) -> None:
    world = Snapshotted(tmp_path, files=True)
    table = SegmentTable()
    table.begin_lazy(*world.begin)
    world.rows[FIRST_SLOT + 2_000] = world.rows[FIRST_SLOT]  # of other blocks than the delta says
    world.load(table)
    with pytest.raises(CorruptRecordError, match="makes no sense"):
        recover(tmp_path, table, SIZE, start=world.start)


def test_a_newer_file_behind_a_snapshot_is_refused(tmp_path: Path) -> None:
    world = Snapshotted(tmp_path, files=True)
    log = world.log
    log.tail = LogTail(1 << 20, 99, log.tail.file + 1, log.tail.lsn, b"SARPLOG9" + struct.pack("<I", SIZE), LogFiles())
    log.group()
    with pytest.raises(StorageError, match="newer program"):
        world.recover()


def test_a_replay_holds_what_a_group_over_several_pieces_stands_in() -> None:
    """Staged records are read where they stand: the pieces must not go away before the group ends."""
    records = [b"".join(pieces) for pieces in _pieces()]
    replay = LogReplay(SegmentTable())
    offset = 0
    for data in records:
        piece = bytearray(data)
        assert replay.feed(piece, 1, offset, offset) == offset + len(data)
        offset += len(data)
        with pytest.raises(BufferError):
            piece.append(0)  # it is held
        del piece
    assert [payload for _, payload in replay.others][1:] == [bytes([number]) * 100 for number in range(4)]
    assert replay.staged_records == 0


def _pieces() -> Iterable[list[bytes]]:
    tail = LogTail(1 << 20, 1, 1, 0, header_prefix(SIZE), LogFiles())
    sizes = [tail.offset]
    for number in range(4):
        tail.append_record(RecordType.NAMESPACE, bytes([number]) * 100)
        sizes.append(tail.offset)
    ((_, _, data),) = tail.begin_write(0)
    sizes[-1] = len(data)
    begin = 0
    for end in sizes:
        yield [bytes(data[begin:end])]
        begin = end
