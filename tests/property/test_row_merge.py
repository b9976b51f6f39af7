"""Merging the rows of runs, compiled, equals the obvious way: a dictionary into which the runs go, oldest first."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sarp_cluster.core.posting_run import PostingRun
from sarp_cluster.errors import InvariantViolationError, SnapshotDamagedError
from sarp_cluster.storage.checksum import crc32c
from sarp_cluster.storage.file_system import DISK
from sarp_cluster.storage.run_file import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    FIRST_SLOT,
    ROW_BYTES,
    ROWS_AT,
    RunEntry,
    RunFile,
    newest_rows,
    write_run_file,
)
from sarp_cluster.storage.run_packing import RowMerge, RunPacker

SOURCES_MAX = 16
SLOTS_MAX = 2**31

Run = dict[int, bytes]


@st.composite
def runs(draw: st.DrawFn) -> list[Run]:
    """Some runs, newest first: of a few rows, or of chunks of them; over one range, or each over its own part of it."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    span = draw(st.sampled_from([8, CHUNK_ROWS, 3 * CHUNK_ROWS, 20 * CHUNK_ROWS, SLOTS_MAX - FIRST_SLOT]))
    sizes = st.sampled_from([0, 1, 2, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 9 * CHUNK_ROWS])
    made = []
    for size in draw(st.lists(sizes, max_size=5)):
        begin = draw(st.sampled_from([0, span // 2]))
        slots = rng.sample(range(FIRST_SLOT + begin, FIRST_SLOT + span), min(size, span - begin))
        made.append({slot: rng.randbytes(ROW_BYTES) for slot in sorted(slots)})
    return made


def add_memory(merge: RowMerge, run: Run) -> None:
    merge.add_memory(np.array(list(run), np.uint32), np.frombuffer(b"".join(run.values()), np.uint8))


def write(directory: Path, number: int, run: Run) -> RunEntry:
    merge = RowMerge()
    add_memory(merge, run)
    return write_run_file(DISK, directory, PostingRun(number), merge)


def expected_chunks(merged: Run) -> list[bytes]:
    slots = sorted(merged)
    chunks = []
    for begin in range(0, len(slots), CHUNK_ROWS):
        part = slots[begin : begin + CHUNK_ROWS]
        column = b"".join(slot.to_bytes(4, "little") for slot in part)
        rows = b"".join(merged[slot] for slot in part)
        chunks.append((column.ljust(ROWS_AT, b"\0") + rows).ljust(CHUNK_BYTES, b"\0"))
    return chunks


def packed(merge: RowMerge) -> tuple[bytes, bytes, bytes]:
    packer = RunPacker()
    data, entries, checksums = [], [], []
    while packer.rows(merge):
        data.append(bytes(packer.data))
        entries.append(packer.entries)
        checksums.append(packer.checksums)
    return b"".join(data), b"".join(entries), b"".join(checksums)


@given(sources=runs(), in_memory=st.lists(st.booleans(), min_size=5, max_size=5))
@example(sources=[{FIRST_SLOT: bytes([i]) * ROW_BYTES} for i in range(SOURCES_MAX)], in_memory=[False] * SOURCES_MAX)
def test_a_merge_has_of_each_slot_the_newest_row(sources: list[Run], in_memory: list[bool]) -> None:
    merged: Run = {}
    for run in reversed(sources):
        merged |= run
    with TemporaryDirectory() as directory:
        merge, files = RowMerge(), []
        for number, (run, stays) in enumerate(zip(sources, in_memory, strict=False)):
            file = RunFile(Path(directory), write(Path(directory), number, run))
            files.append(file)
            if stays:
                add_memory(merge, run)
            else:
                file.add_rows(merge)
        data, entries, checksums = packed(merge)
        slots, rows = newest_rows(files, 0, SLOTS_MAX)
    chunks = expected_chunks(merged)
    assert data == b"".join(chunks)
    assert checksums == b"".join(crc32c(chunk).to_bytes(4, "little") for chunk in chunks)
    counts = [min(CHUNK_ROWS, len(merged) - at) for at in range(0, len(merged), CHUNK_ROWS)]
    assert np.frombuffer(entries, "<u4").reshape(-1, 2).tolist() == [
        [int.from_bytes(chunk[:4], "little"), count] for chunk, count in zip(chunks, counts, strict=True)
    ]
    assert slots.tolist() == sorted(merged), "what a restart reads from the same runs"
    assert rows.tobytes() == b"".join(merged[slot] for slot in sorted(merged))


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("damage", [flipped, os.truncate])
def test_a_chunk_that_does_not_verify_ends_the_merge(
    tmp_path: Path, chunk: int, damage: Callable[[Path, int], None]
) -> None:
    rows = {slot: bytes(ROW_BYTES) for slot in range(FIRST_SLOT, FIRST_SLOT + 3 * CHUNK_ROWS)}
    merge = RowMerge()
    RunFile(tmp_path, write(tmp_path, 2, rows)).add_rows(merge)
    damaged = RunFile(tmp_path, write(tmp_path, 1, rows))
    damaged.add_rows(merge)
    damage(damaged.path, chunk * CHUNK_BYTES + 77)
    with pytest.raises(SnapshotDamagedError, match=f"run-000001.*offset {chunk * CHUNK_BYTES} ") as caught:
        packed(merge)
    assert caught.value.run == 1


def test_a_file_that_cannot_be_read_is_an_error_of_the_disk(tmp_path: Path) -> None:
    file = RunFile(tmp_path, write(tmp_path, 1, {FIRST_SLOT: bytes(ROW_BYTES)}))
    merge = RowMerge()
    entries, checksums = np.array([FIRST_SLOT, 1], np.uint32), np.zeros(1, np.uint32)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        merge.add_file(file, directory, 0, entries, checksums)
        with pytest.raises(IsADirectoryError, match="run-000001"):
            packed(merge)
    finally:
        os.close(directory)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    merge = RowMerge()
    slots = np.arange(FIRST_SLOT, FIRST_SLOT + 2, dtype=np.uint32)
    with pytest.raises(ValueError, match="79 bytes for 2 rows"):
        merge.add_memory(slots, np.zeros(79, np.uint8))
    file = RunFile(tmp_path, write(tmp_path, 1, {FIRST_SLOT: bytes(ROW_BYTES)}))
    with pytest.raises(ValueError, match="2 checksums for 1 chunks"):
        merge.add_file(file, -1, 0, slots, slots)
    for add in [partial(add_memory, merge, {}), partial(file.add_rows, merge)] * (SOURCES_MAX // 2):
        add()
    with pytest.raises(InvariantViolationError, match=f"more than {SOURCES_MAX} runs"):
        add_memory(merge, {})
