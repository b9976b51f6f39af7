"""Run files: what is written is read, chunk by chunk, and what was damaged is never taken for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.posting_run import PostingRun
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.errors import CorruptRecordError
from sarp_cluster.storage.file_system import DISK
from sarp_cluster.storage.run_file import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    FIRST_SLOT,
    PAGE_ROWS,
    ROW_BYTES,
    RunEntry,
    RunFile,
    newest_rows,
    run_file_name,
    write_run_file,
)
from sarp_cluster.storage.run_packing import RowMerge

POSTINGS_A_CHUNK = 2_340


def some_run(number: int, postings: int) -> PostingRun:
    """A run of postings under keys that are evenly spread."""
    directory = RoutingDirectory(SarpParameters(IndexConfig()))
    rng = random.Random(number)
    for slot in range(FIRST_SLOT, FIRST_SLOT + postings):
        directory.add_posting(rng.getrandbits(64), rng.getrandbits(64), rng.getrandbits(64), slot)
    directory.freeze()
    merge = directory.begin_merge(1, 1, number)
    while merge.step(1_000):
        pass
    return merge.run


def some_rows(slots: Sequence[int], fill: int) -> RowMerge:
    rows = RowMerge()
    rows.add_memory(np.array(slots, np.uint32), np.full(len(slots) * ROW_BYTES, fill, np.uint8))
    return rows


def write(directory: Path, number: int, postings: int, slots: range, fill: int = 0) -> tuple[PostingRun, RunEntry]:
    run = some_run(number, postings)
    return run, write_run_file(DISK, directory, run, some_rows(slots, fill))


@pytest.mark.parametrize("postings", [0, 1, POSTINGS_A_CHUNK, POSTINGS_A_CHUNK + 1, 8 * POSTINGS_A_CHUNK + 1])
@pytest.mark.parametrize("rows", [0, 1, CHUNK_ROWS, CHUNK_ROWS + 1, 8 * CHUNK_ROWS, 17 * CHUNK_ROWS])
def test_what_is_written_is_read(tmp_path: Path, postings: int, rows: int) -> None:
    slots = range(FIRST_SLOT, FIRST_SLOT + 3 * rows, 3)
    run, entry = write(tmp_path, 7, postings, slots, fill=5)
    file = RunFile(tmp_path, entry)
    assert (tmp_path / run_file_name(7)).stat().st_size == entry.bytes
    assert entry.posting_chunks == -(-postings // POSTINGS_A_CHUNK)
    assert entry.row_chunks == -(-rows // CHUNK_ROWS)
    lazy = PostingRun.lazy(7, file.posting_index)
    for chunk in range(lazy.chunks):
        assert file.posting_chunk(chunk) == bytes(run.chunk(chunk))
        lazy.install(chunk, file.posting_chunk(chunk))
    assert lazy.fault() is None
    assert lazy.postings == postings
    read_slots, read_rows = file.rows_of_slots(0, 2**32 - 1)
    assert list(read_slots) == list(slots)
    assert read_rows.shape == (rows, ROW_BYTES)
    assert (read_rows == 5).all()
    assert list(file.verify()) == []


def test_the_rows_of_a_page_are_found_wherever_chunks_end(tmp_path: Path) -> None:
    rng = random.Random(1)
    slots = sorted(rng.sample(range(FIRST_SLOT, FIRST_SLOT + 40 * PAGE_ROWS), 7_000))
    entry = write_run_file(DISK, tmp_path, some_run(1, 0), some_rows(slots, fill=0))
    file = RunFile(tmp_path, entry)
    for page in range(41):
        begin = FIRST_SLOT + page * PAGE_ROWS
        found, _ = file.rows_of_slots(begin, begin + PAGE_ROWS)
        assert list(found) == [slot for slot in slots if begin <= slot < begin + PAGE_ROWS]


def test_of_a_slot_in_several_runs_the_newest_row_holds(tmp_path: Path) -> None:
    entries = [
        write(tmp_path, number, 0, range(FIRST_SLOT, FIRST_SLOT + 300, step), fill=number)[1]
        for number, step in ((3, 3), (2, 2), (1, 1))
    ]
    files = [RunFile(tmp_path, entry) for entry in entries]  # newest first
    slots, rows = newest_rows(files, FIRST_SLOT, FIRST_SLOT + 300)
    assert list(slots) == list(range(FIRST_SLOT, FIRST_SLOT + 300))
    for slot, row in zip(slots - FIRST_SLOT, rows, strict=True):
        assert row[0] == (3 if slot % 3 == 0 else 2 if slot % 2 == 0 else 1)


def test_a_changed_byte_is_found_whichever_it_is(tmp_path: Path) -> None:
    """In a chunk when that is read, in the index when the file is opened."""
    _, entry = write(tmp_path, 1, 5_000, range(FIRST_SLOT, FIRST_SLOT + 3_000))
    path = tmp_path / run_file_name(1)
    good = path.read_bytes()
    for at in [*range(0, entry.index_at, 4_001), *range(entry.index_at, entry.bytes)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        if at >= entry.index_at:
            with pytest.raises(CorruptRecordError, match=path.name):
                RunFile(tmp_path, entry)
            continue
        file = RunFile(tmp_path, entry)
        assert [f"offset {at // CHUNK_BYTES * CHUNK_BYTES} " in problem for problem in file.verify()] == [True]


def test_a_file_of_another_length_or_number_is_refused(tmp_path: Path) -> None:
    _, entry = write(tmp_path, 1, 10, range(FIRST_SLOT, FIRST_SLOT + 10))
    _, other = write(tmp_path, 2, 10, range(FIRST_SLOT, FIRST_SLOT + 10), fill=1)
    first, second = tmp_path / run_file_name(1), tmp_path / run_file_name(2)
    assert entry.bytes == other.bytes
    swapped = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(CorruptRecordError, match="run-000001"):
        RunFile(tmp_path, entry)
    for length in (0, 1, CHUNK_BYTES, len(swapped) - 1):
        first.write_bytes(swapped[:length])
        with pytest.raises(CorruptRecordError, match=f"{length} bytes"):
            RunFile(tmp_path, entry)
    first.unlink()
    with pytest.raises(FileNotFoundError):
        RunFile(tmp_path, entry)


def test_a_chunk_at_the_place_of_another_is_found(tmp_path: Path) -> None:
    _, entry = write(tmp_path, 1, 3 * POSTINGS_A_CHUNK, range(FIRST_SLOT, FIRST_SLOT + 3 * CHUNK_ROWS))
    path = tmp_path / run_file_name(1)
    data = bytearray(path.read_bytes())
    data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES] = data[CHUNK_BYTES : 2 * CHUNK_BYTES], data[:CHUNK_BYTES]
    path.write_bytes(data)
    assert len(list(RunFile(tmp_path, entry).verify())) == 2
