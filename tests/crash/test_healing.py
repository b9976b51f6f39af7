"""Segments whose images have rotted: the next insert that meets one stores what it held again, and all is as it was.

Whatever is damaged, inserts are acknowledged and found, no block gets two homes, and nothing that was removed or lost
comes back: not later, not from a snapshot, not from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import CorruptRecordError
from sarp_cluster.storage.record import read_frame
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, Namespace, NamespaceSpec, Worker
from shard.index import Index

Tokens = tuple[int, ...]

CONFIG = IndexConfig(segment_blocks=8, base_points=2, pruning_threshold=1, refinement_threshold=3)
FIRST_SLOT = 4_096
A, B, C = Worker("a"), Worker("b"), Worker("c")
STEM = tuple(range(30))  # three full segments and one of 6 blocks


class Store:
    """An index, and what is done to its files behind its back."""

    def __init__(self, index: Index, namespace: Namespace, directory: Path) -> None:
        self.index = index
        self.namespace = namespace
        self.directory = directory

    @classmethod
    @asynccontextmanager
    async def opened(cls, directory: Path, config: IndexConfig = CONFIG) -> AsyncIterator[Store]:
        index = await Index.open(directory, config, secret=bytes(32))
        await index.stop_background()
        try:
            yield cls(
                index, index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE)), directory
            )
        finally:
            await index.close()

    def rows(self) -> list[dict[str, int]]:
        """The segments there are, by slot."""
        table = self.index.state.table
        return [row for slot in range(FIRST_SLOT, table.slots_end) if (row := table.describe(slot)) is not None]

    async def insert(self, tokens: Tokens, worker: Worker = A, first: int = 0) -> int:
        got = await self.index.insert(self.namespace, chained_block_ids(tokens), worker=worker, first=first)
        assert got.durable
        return got.blocks_added

    async def remove(self, tokens: Tokens, worker: Worker, first: int = 0) -> int:
        return await self.index.remove(self.namespace, chained_block_ids(tokens), worker=worker, first=first)

    async def holders(self, tokens: Tokens) -> dict[str, int]:
        """How much of it each worker holds; the same both ways."""
        answers = [
            await self.index.match(self.namespace, chained_block_ids(tokens), strategy=strategy)
            for strategy in ("wave", "stepwise")
        ]
        found = [{worker.instance_id: worker.remote for worker in answer.workers} for answer in answers]
        assert found[0] == found[1]
        return found[0]

    async def spoil(self, *slots: int) -> None:
        """Damage what these segments have on the disk."""
        await self.index.store.sync()
        rows = [row for row in self.rows() if row["slot"] in slots]
        assert len(rows) == len(slots)
        await asyncio.to_thread(self._flip, [row["delta"] or row["image"] for row in rows])

    def _flip(self, places: Iterable[int]) -> None:
        for place in places:
            path = self.directory / log_file_name(place >> 48)
            data = bytearray(path.read_bytes())
            data[((place & 0xFFFFFFFF) << 3) + 70] ^= 0xFF
            path.write_bytes(data)

    async def finish(self) -> None:
        """No posting is left of what is gone."""
        await self.index.drain_backfill()
        assert not self.index.state.table.stale
        await self.index.validate()


def check_verified(directory: Path, *, named: bool = True) -> None:
    """What was damaged is named, and nothing else."""
    found = verify(directory)
    assert found.clean
    assert found.findings or not named


def forget_snapshots(directory: Path) -> None:
    """Open from the log alone."""
    for path in directory.glob("manifest-*"):
        path.unlink()


def leaf(rows: list[dict[str, Any]]) -> int:
    """The segment of the deepest window."""
    return int(max(rows, key=lambda row: row["window"])["slot"])


@pytest.mark.parametrize("purged", [True, False], ids=["purged", "stale"])
@pytest.mark.parametrize("snapshot", ["none", "before", "after", "both", "removed"])
async def test_a_damaged_leaf_is_stored_again(tmp_path: Path, purged: bool, snapshot: str) -> None:
    async with Store.opened(tmp_path / "store") as store:
        await store.insert(STEM)
        await store.insert(STEM, B)
        if snapshot in ("before", "both"):
            await store.index.snapshot()
        await store.spoil(leaf(store.rows()))
        assert await store.holders(STEM) == {"a": 24, "b": 24}
        assert await store.insert(STEM, C) == 6
        assert await store.holders(STEM) == {"c": 30, "a": 24, "b": 24}
        await store.index.validate()
        if purged:
            await store.finish()
        if snapshot in ("after", "both", "removed"):
            await store.index.snapshot()
    await asyncio.to_thread(check_verified, tmp_path / "store")
    if snapshot == "removed":
        await asyncio.to_thread(forget_snapshots, tmp_path / "store")
    async with Store.opened(tmp_path / "store") as store:
        await store.index.load_all()
        await store.index.validate()
        assert await store.holders(STEM) == {"c": 30, "a": 24, "b": 24}
        assert await store.insert(STEM, A) == 0
        assert await store.insert((*STEM, 7, 8, 9), A, 30) == 3
        assert await store.holders((*STEM, 7, 8, 9)) == {"a": 33, "c": 30, "b": 24}
        await store.finish()
        assert await store.remove((*STEM, 7, 8, 9), A, 24)
        assert await store.holders((*STEM, 7, 8, 9)) == {"c": 30, "a": 24, "b": 24}


async def test_a_removal_that_meets_a_damaged_leaf_goes_through(tmp_path: Path) -> None:
    async with Store.opened(tmp_path / "store") as store:
        await store.insert(STEM)
        await store.insert(STEM, B)
        await store.spoil(leaf(store.rows()))
        assert await store.remove(STEM, A)
        assert await store.holders(STEM) == {"b": 24}
        assert await store.insert(STEM, B) == 6
        assert await store.holders(STEM) == {"b": 30}
        await store.finish()


async def test_the_scrub_repairs_what_it_finds(tmp_path: Path) -> None:
    async with Store.opened(tmp_path / "store") as store:
        await store.insert(STEM)
        await store.spoil(leaf(store.rows()))
        await store.index.background.scrub.step(0.0)
        assert store.index.background.scrub.damaged == 1
        assert len(store.rows()) == 3
        await store.finish()
        await store.index.background.scrub.step(1.0)
        assert store.index.background.scrub.damaged == 0


async def test_a_slot_is_used_again_only_when_its_postings_are_gone(tmp_path: Path) -> None:
    """Those of a leaf stand under keys that only the leaf knew."""
    async with Store.opened(tmp_path / "store") as store:
        for last in range(20):
            await store.insert((*STEM, last))
        slots = [row["slot"] for row in store.rows() if row["window"] == 3 and row["origin"] and not row["children"]]
        gone = slots[:4]
        await store.spoil(*gone)
        for last in range(20):
            await store.insert((*STEM, last), B)
        assert not {row["slot"] for row in store.rows()} & set(gone)
        assert store.index.state.table.stale.keys() == set(gone)
        await store.insert(tuple(range(1_000, 1_080)))
        assert not {row["slot"] for row in store.rows()} & set(gone)
        await store.finish()
        await store.insert(tuple(range(2_000, 2_080)))
        assert {row["slot"] for row in store.rows()} > set(gone)
        for last in range(20):
            assert (await store.holders((*STEM, last)))["b"] == 31
        await store.index.validate()


async def test_matches_and_back_fills_pass_over_what_is_gone(tmp_path: Path) -> None:
    """Lists with stale postings outgrow their thresholds; their finer entries are filled without these."""
    async with Store.opened(tmp_path / "store") as store:
        branches = [(*range(5), *range(100 * n, 100 * n + 3)) for n in range(1, 4)]
        for tokens in branches:
            await store.insert(tokens)
        await store.spoil(*(row["slot"] for row in store.rows()))
        for tokens in branches:
            assert await store.holders(tokens) == {}
        more = [(*range(5), *range(100 * n, 100 * n + 3)) for n in range(10, 16)]
        for tokens in (*more, *branches):
            await store.insert(tokens, B)
            await store.index.validate()
        for tokens in (*more, *branches):
            assert (await store.holders(tokens))["b"] == 8
        await store.finish()
        for tokens in (*more, *branches):
            assert (await store.holders(tokens))["b"] == 8


# --- origins ----------------------------------------------------------------------------------------------------------

ORIGIN = tuple(range(7))
COPIES = ((*range(3), 50, 51), (*range(5), 60), (*range(4), 70, 71, 72, *range(80, 90)))


def origin(store: Store) -> int:
    """The segment that the others were copied from."""
    return min(row["slot"] for row in store.rows() if row["children"] and row["window"] == 0)


@pytest.mark.parametrize("meets", [ORIGIN, *COPIES, (*range(5), 60, 61)], ids=str)
@pytest.mark.parametrize("purged", [True, False], ids=["purged", "stale"])
@pytest.mark.parametrize("kept", [True, False], ids=["snapshot", "log"])
async def test_a_damaged_origin_keeps_what_copies_have_of_it(
    tmp_path: Path, meets: Tokens, purged: bool, kept: bool
) -> None:
    async with Store.opened(tmp_path / "store") as store:
        for tokens in (ORIGIN, *COPIES):
            await store.insert(tokens)
        slot = origin(store)
        await store.spoil(slot)
        for tokens in (ORIGIN, *COPIES):
            assert await store.holders(tokens) == {}
        added = await store.insert(meets, B)
        assert added == {ORIGIN: 2, (*range(5), 60, 61): 1}.get(meets, 0)
        row = store.index.state.table.describe(slot)
        assert row is not None
        assert row["count"] in (5, 7)
        assert row["children"] == 3
        assert await store.holders(meets) == {"b": len(meets)}
        await store.index.validate()
        if purged:
            await store.finish()
        for tokens in (ORIGIN, *COPIES):
            await store.insert(tokens, C)
            assert (await store.holders(tokens))["c"] == len(tokens)
        await store.index.validate()
        await store.remove(ORIGIN, C)
        for tokens in (ORIGIN, *COPIES):
            assert "c" not in await store.holders(tokens)
        if kept:
            await store.index.snapshot()
    await asyncio.to_thread(check_verified, tmp_path / "store")
    async with Store.opened(tmp_path / "store") as store:
        await store.index.load_all()
        await store.index.validate()
        assert await store.holders(meets) == {"b": len(meets)}
        await store.finish()
        assert await store.holders(meets) == {"b": len(meets)}


async def test_a_damaged_copy_of_a_damaged_origin(tmp_path: Path) -> None:
    """The copy goes first, or is cut itself; then the origin, to what the next one has."""
    async with Store.opened(tmp_path / "store") as store:
        for tokens in (ORIGIN, *COPIES):
            await store.insert(tokens)
        rows = store.rows()
        await store.spoil(origin(store), *(row["slot"] for row in rows if row["fork"] == 5))
        for tokens in COPIES:
            await store.insert(tokens, B)
            assert await store.holders(tokens) == {"b": len(tokens)}
        await store.finish()


async def test_all_of_a_family_is_damaged(tmp_path: Path) -> None:
    async with Store.opened(tmp_path / "store") as store:
        for tokens in (ORIGIN, *COPIES):
            await store.insert(tokens)
        await store.spoil(*(row["slot"] for row in store.rows()))
        with pytest.raises(CorruptRecordError):  # a copy that has a child cannot be read, and so nothing of it is known
            await store.insert(ORIGIN, B)
        for tokens in (*reversed(COPIES), ORIGIN):
            await store.insert(tokens, B)
        for tokens in (ORIGIN, *COPIES):
            assert await store.holders(tokens) == {"b": len(tokens)}
        await store.finish()


async def test_what_is_behind_a_damaged_segment_keeps_it(tmp_path: Path) -> None:
    """What it held, only an insert that goes on behind it tells. Until then changes that end in it are refused."""
    async with Store.opened(tmp_path / "store") as store:
        await store.insert(STEM)
        (first,) = (row["slot"] for row in store.rows() if row["window"] == 0)
        await store.spoil(first)
        for tokens in (STEM[:8], STEM[:5], (*STEM[:5], 99)):
            with pytest.raises(CorruptRecordError, match="others depend on it"):
                await store.insert(tokens, B)
            with pytest.raises(CorruptRecordError, match="others depend on it"):
                await store.remove(tokens, A)
        assert await store.insert(STEM[:9], B) == 0
        assert await store.insert((*STEM[:5], 99), B) == 1
        assert await store.holders(STEM) == {"b": 9}
        await store.finish()


# --- whatever is damaged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("log_file_bytes", [4_096, 2**20], ids=["many files", "one file"])
async def test_any_damage_heals_when_everything_is_inserted_again(
    tmp_path: Path, seed: int, log_file_bytes: int
) -> None:
    rng = random.Random(seed)
    config = dataclasses.replace(CONFIG, log_file_bytes=log_file_bytes)
    sequences: list[Tokens] = [STEM]
    for number in range(30):
        base = rng.choice(sequences)
        sequences.append(
            (*base[: rng.randrange(len(base) + 1)], *(100 * number + n for n in range(rng.randrange(1, 25))))
        )
    for number in range(3):
        async with Store.opened(tmp_path / "store", config) as store:
            await store.index.load_all()
            await store.index.validate()
            for tokens in sequences:
                await store.insert(tokens, B)
            if rng.randrange(2):
                await store.index.snapshot()
            slots = [row["slot"] for row in store.rows()]
            await store.spoil(*rng.sample(slots, rng.randrange(1, len(slots) // 2)))
            healer = Worker(f"healer {number}")
            waiting = sequences
            while waiting:
                refused = []
                for tokens in waiting:
                    try:
                        await store.insert(tokens, healer)
                    except CorruptRecordError:  # what goes on behind a segment heals it: another one
                        refused.append(tokens)
                    if rng.randrange(8) == 0:
                        await store.index.backfill_step()
                assert len(refused) < len(waiting)
                waiting = refused
            await store.index.validate()
            for tokens in sequences:
                held = await store.holders(tokens)
                assert held[healer.instance_id] == len(tokens)
            if rng.randrange(2):
                await store.finish()
            for tokens in sequences:
                await store.remove(tokens, healer)
            for tokens in sequences:
                assert healer.instance_id not in await store.holders(tokens)
            if rng.randrange(2):
                await store.index.snapshot()
        await asyncio.to_thread(check_verified, tmp_path / "store", named=False)  # it may be reclaimed
        if rng.randrange(2):
            await asyncio.to_thread(forget_snapshots, tmp_path / "store")


# --- in between -------------------------------------------------------------------------------------------------------


def cut_copy(source: Path, directory: Path, length: int, *, snapshots: bool) -> None:
    """A copy of a store as a crash would leave it that cut off the end of its last log file."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    last = sorted(directory.glob("log-*"))[-1]
    last.write_bytes(last.read_bytes()[:length])
    if not snapshots:
        forget_snapshots(directory)


def boundaries(directory: Path, begin: int) -> list[int]:
    """Where records of the first log file end, from this offset on."""
    data, ends = (directory / log_file_name(1)).read_bytes(), []
    while begin < len(data):
        header = read_frame(data, begin, 1, begin)
        assert header is not None
        begin += (32 + header.payload_bytes + 7) // 8 * 8
        ends.append(begin)
    return ends


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshot", "log"])
async def test_a_crash_at_any_record_of_the_healing(tmp_path: Path, snapshots: bool) -> None:
    """Either it has happened or not, and then it happens again."""
    sequences = (ORIGIN, *COPIES, STEM)
    async with Store.opened(tmp_path / "store") as store:
        for tokens in sequences:
            await store.insert(tokens)
        await store.index.snapshot()
        before = store.index.store.position[1]
        await store.spoil(*(row["slot"] for row in store.rows() if row["fork"] != 5 and row["window"] != 2))
        for tokens in reversed(sequences):
            with contextlib.suppress(CorruptRecordError):
                await store.insert(tokens, B)
        for tokens in sequences:
            await store.insert(tokens, B)
        await store.finish()
        for tokens in sequences:
            await store.insert((*tokens, 7, 7), B)
    refused = 0
    ends = await asyncio.to_thread(boundaries, tmp_path / "store", before)
    assert len(ends) > 30
    for length in ends:
        await asyncio.to_thread(cut_copy, tmp_path / "store", tmp_path / "cut", length, snapshots=snapshots)
        try:
            async with Store.opened(tmp_path / "cut") as store:
                await store.index.load_all()
                for tokens in (*reversed(sequences), *sequences):
                    with contextlib.suppress(CorruptRecordError):
                        await store.insert(tokens, C)
                for tokens in sequences:
                    assert (await store.holders(tokens))["c"] == len(tokens)
                await store.finish()
                for tokens in sequences:
                    await store.remove(tokens, C)
                for tokens in sequences:
                    assert "c" not in await store.holders(tokens)
        except CorruptRecordError:
            assert not snapshots, length
            refused += 1
    assert snapshots or 0 < refused < len(ends) - 8


async def test_many_meet_the_same_damage_at_once(tmp_path: Path) -> None:
    async with Store.opened(tmp_path / "store") as store:
        sequences = (ORIGIN, *COPIES)
        for tokens in sequences:
            await store.insert(tokens)
        await store.spoil(*(row["slot"] for row in store.rows() if row["fork"] != 4))
        workers = [Worker(f"w{number}") for number in range(5)]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                for tokens in sequences:
                    group.create_task(store.insert(tokens, worker))
        for tokens in sequences:
            held = await store.holders(tokens)
            assert {name: held[name] for name in held if name != "a"} == {
                one.instance_id: len(tokens) for one in workers
            }
        await store.finish()
        assert store.index.statistics().blocks == len({tokens[:end] for tokens in sequences for end in range(1, 99)})


async def test_a_record_behind_the_last_snapshot_that_was_healed(tmp_path: Path) -> None:
    """The store opens from the log; the snapshot cannot be used any more, and that is remembered."""
    async with Store.opened(tmp_path / "store") as store:
        await store.insert(STEM[:20])
        await store.index.snapshot()
        await store.insert(STEM)
        await store.spoil(leaf(store.rows()))
        await store.insert(STEM, B)
        await store.insert(tuple(range(500, 530)), B)
    async with Store.opened(tmp_path / "store") as store:
        assert store.index.snapshots.newest is None
        await store.index.validate()
        assert await store.holders(STEM) == {"b": 30, "a": 24}
        names = await asyncio.to_thread(os.listdir, tmp_path / "store")
        assert sum(name.endswith(".bad") for name in names) == 1
        await store.index.snapshot()
    async with Store.opened(tmp_path / "store") as store:
        assert store.index.snapshots.newest is not None
        assert await store.holders(STEM) == {"b": 30, "a": 24}


async def test_a_back_fill_waits_for_a_segment_that_cannot_be_repaired(tmp_path: Path) -> None:
    """Its entries, without that segment, would hide it, and its blocks be stored again."""
    long = (*range(8), *range(100, 104))
    branches = [(*range(5), *range(200 + 10 * n, 203 + 10 * n)) for n in range(4)]
    async with Store.opened(tmp_path / "store") as store:
        await store.insert(long)
        (first,) = (row["slot"] for row in store.rows() if row["window"] == 0)
        await store.insert(branches[0])
        await store.spoil(first)
        await store.index.drain_backfill()
        assert store.index.statistics().backfills_pending > 0
        with pytest.raises(CorruptRecordError):
            await store.insert(long[:8], B)
        assert await store.insert(long, B) == 0
        assert await store.insert(long[:8], B) == 0
        await store.finish()
        assert store.index.statistics().backfills_pending == 0
        for tokens in branches[1:]:
            await store.insert(tokens, B)
        assert await store.insert(long[:8], C) == 0
        await store.finish()
