"""The baselines answer like a brute-force index: a comparison with a wrong one would be worth nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import shutil
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench.baselines import Contestant, Match
from bench.baselines.flat_map import FlatMapIndex
from bench.baselines.python_dict import DictIndex
from bench.baselines.rocksdb_block_hash import (
    BlockHashStore,
    GroupCommit,
    Insert,
    LibRocksStore,
    RocksDictStore,
    c_library,
)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the C++ baseline needs g++")
both = pytest.mark.parametrize("make", [DictIndex, pytest.param(FlatMapIndex, marks=needs_compiler)])


class BruteForce:
    """What the answer is, by its definition."""

    name = "brute force"

    def __init__(self) -> None:
        self._held: dict[int, set[int]] = {}

    def match(self, ids: bytes) -> Match:
        blocks = struct.unpack(f"<{len(ids) // 8}Q", ids)

        def prefix(holds: Callable[[int], bool]) -> int:
            return next((at for at, block in enumerate(blocks) if not holds(block)), len(blocks))

        reached = {worker: prefix(held.__contains__) for worker, held in self._held.items()}
        workers = sorted(((w, n) for w, n in reached.items() if n), key=lambda pair: (-pair[1], pair[0]))
        return Match(prefix(lambda block: any(block in held for held in self._held.values())), workers)

    def insert(self, ids: bytes, worker: int, first: int) -> None:
        self._held.setdefault(worker, set()).update(struct.unpack(f"<{len(ids) // 8}Q", ids)[first:])


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


@both
@pytest.mark.parametrize("seed", range(8))
def test_a_baseline_answers_like_brute_force(make: Callable[[], Contestant], seed: int) -> None:
    rng = random.Random(seed)
    index, expected = make(), BruteForce()
    workers = rng.choice([1, 3, 12, 70])
    # Sequences branch off one another anywhere. Small IDs share all their upper bits: probing has to cope.
    bits = rng.choice([14, 64])
    known = [[rng.getrandbits(bits) for _ in range(rng.randrange(1, 300))]]
    for _ in range(400):
        parent = rng.choice(known)
        sequence = parent[: rng.randrange(len(parent) + 1)] + [rng.getrandbits(bits) for _ in range(rng.randrange(40))]
        if sequence:
            known.append(sequence)
        ids = packed(*sequence)
        assert index.match(ids) == expected.match(ids)
        if rng.random() < 0.7:
            worker = rng.randrange(workers)
            first = rng.choice([0, 0, rng.randrange(len(sequence) + 1)])  # a later start leaves a hole in its prefix
            index.insert(ids, worker, first)
            expected.insert(ids, worker, first)
            assert index.match(ids) == expected.match(ids)


@both
def test_a_worker_counts_up_to_its_first_missing_block(make: Callable[[], Contestant]) -> None:
    index = make()
    index.insert(packed(0, 1, 2, 3, 4), 7, 0)
    index.insert(packed(0, 1, 2), 5, 0)
    index.insert(packed(0, 1, 2, 3, 4), 9, 3)
    assert index.match(packed(0, 1, 2, 3, 9)) == Match(4, [(7, 4), (5, 3)])
    assert index.match(packed(3, 4)) == Match(2, [(7, 2), (9, 2)])
    assert index.match(packed(8)) == Match(0, [])
    assert index.match(b"") == Match(0, [])
    index.insert(b"", 1, 0)
    index.insert(packed(1), 1, 1)
    assert index.match(packed(1)) == Match(1, [(5, 1), (7, 1)])


@needs_compiler
def test_the_flat_map_refuses_a_worker_beyond_its_bound() -> None:
    index = FlatMapIndex(workers_max=4)
    for worker in (-1, 4):
        with pytest.raises(ValueError, match=r"0\.\.3"):
            index.insert(packed(1), worker, 0)


@needs_compiler
def test_the_flat_map_counts_its_blocks_and_bytes() -> None:
    index = FlatMapIndex()
    ids = random.Random(1).randbytes(8 * 100_000)
    index.insert(ids, 0, 0)
    index.insert(ids, 1, 0)
    assert len(index) == 100_000
    assert 24 / 0.7 * 100_000 <= index.resident_bytes <= 2 * 24 / 0.7 * 100_000 + 1024


class SlowStore:
    """Takes what is written when it is told to."""

    name = "slow"

    def __init__(self) -> None:
        self.batches: list[list[Insert]] = []
        self.go = threading.Event()

    def write(self, inserts: Sequence[Insert]) -> None:
        self.go.wait()
        self.batches.append(list(inserts))

    def counted(self, what: str) -> int:
        return len(self.batches)

    def contains(self, ids: bytes, worker: int) -> bool:
        return True

    def close(self) -> None:
        pass


async def test_callers_who_come_while_a_batch_is_written_share_the_next_one() -> None:
    store = SlowStore()
    commit = GroupCommit(store)
    first = asyncio.ensure_future(commit.insert(b"first", 0))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(commit.insert(b"other", number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    assert not first.done()
    store.go.set()
    await asyncio.gather(first, *others)
    await commit.insert(b"last", 6)
    commit.close()
    assert [[worker for _, worker in batch] for batch in store.batches] == [[0], [1, 2, 3, 4, 5], [6]]


def _rocksdict(directory: Path) -> BlockHashStore:
    return RocksDictStore(directory)


def _c_library(directory: Path) -> BlockHashStore:
    library = c_library()
    assert library is not None
    return LibRocksStore(directory, library)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            _rocksdict,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("rocksdict") is None, reason="the extra `bench` is absent"
            ),
        ),
        pytest.param(
            _c_library, marks=pytest.mark.skipif(c_library() is None, reason="RocksDB's C library is not installed")
        ),
    ],
)
def test_a_rocksdb_has_what_was_put_and_counts_its_syncs(
    make: Callable[[Path], BlockHashStore], tmp_path: Path
) -> None:
    store = make(tmp_path)
    rng = random.Random(1)
    inserts = [(rng.randbytes(8 * blocks), worker) for worker, blocks in enumerate((1, 64, 3))]
    store.write(inserts)
    store.write([(rng.randbytes(8), 9)])
    assert all(store.contains(ids, worker) for ids, worker in inserts)
    assert not store.contains(inserts[0][0], 1)
    assert not store.contains(rng.randbytes(8), 0)
    assert store.counted("synced") == 2
    assert store.counted("bytes") > 69 * 20
    store.close()
