"""Damaged segments: an insert that meets one heals the hole (design §4), and one that is refused changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sarp_cluster import limits
from sarp_cluster.errors import TooLargeError
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, Namespace, NamespaceSpec, Worker
from shard.index import Index

STEM = tuple(range(60))
FORK = (*STEM[:50], 99, 99, 99)
LONG = tuple(range(300))  # five segments
A, B = Worker("a"), Worker("b")


@dataclass(frozen=True)
class Store:
    index: Index
    namespace: Namespace
    directory: Path

    async def insert(self, tokens: tuple[int, ...], worker: Worker = A, first: int = 0, generation: int = 0) -> int:
        result = await self.index.insert(
            self.namespace, chained_block_ids(tokens), worker=worker, first=first, generation=generation
        )
        return result.blocks_added

    async def remove(self, tokens: tuple[int, ...], worker: Worker) -> int:
        return await self.index.remove(self.namespace, chained_block_ids(tokens), worker=worker)

    async def holders(self, tokens: tuple[int, ...]) -> dict[str, int]:
        answer = await self.index.match(self.namespace, chained_block_ids(tokens))
        stepwise = await self.index.match(self.namespace, chained_block_ids(tokens), strategy="stepwise")
        assert answer.matched_blocks == stepwise.matched_blocks
        found = {worker.instance_id: worker.remote for worker in answer.workers}
        assert answer.matched_blocks >= max(found.values(), default=0)
        return found

    def slot(self, window: int) -> int:
        """The first segment of a window."""
        table = self.index.state.table
        for slot in range(4_096, table.slots_end):
            row = table.describe(slot)
            if row is not None and row["window"] == window:
                return slot
        raise AssertionError(window)

    async def spoil(self, *slots: int) -> None:
        """Damage these segments' images on the disk."""
        await self.index.store.sync()
        places = []
        for slot in slots:
            row = self.index.state.table.describe(slot)
            assert row is not None
            places.append((row["image"] & 0xFFFFFFFF) << 3)

        def flip() -> None:
            file = self.directory / log_file_name(1)
            data = bytearray(file.read_bytes())
            for place in places:
                data[place + 100] ^= 0xFF
            file.write_bytes(data)

        await asyncio.to_thread(flip)


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Store]:
    directory = tmp_path / "log"
    index = await Index.open(directory, secret=bytes(32))
    try:
        namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
        yield Store(index, namespace, directory)
    finally:
        await index.close()


async def test_a_hole_in_an_origin_heals_with_the_next_inserts(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(STEM)
        await store.insert(FORK)
        await store.spoil(store.slot(0))
        assert await store.holders(FORK) == {}
        await store.insert(STEM, B)
        await store.insert(FORK, B)
        assert await store.holders(STEM) == {"b": len(STEM)}
        assert await store.holders(FORK) == {"b": len(FORK)}


async def test_a_copy_of_a_damaged_origin_heals_without_the_origins_own_sequence(tmp_path: Path) -> None:
    other, deep = (*STEM[:55], 98), (*FORK, *range(200))
    async with opened(tmp_path) as store:
        await store.insert(STEM)
        for tokens in (FORK, other, deep):
            await store.insert(tokens)
        await store.spoil(store.slot(0))
        assert await store.holders(deep) == {}
        for tokens in (FORK, other, deep):
            await store.insert(tokens, B)
        for tokens in (FORK, other, deep):
            assert await store.holders(tokens) == {"b": len(tokens)}
        assert await store.insert(deep, B) == 0


async def test_blocks_shared_after_a_heal_have_one_home(tmp_path: Path) -> None:
    other = (*STEM[:55], 98)
    async with opened(tmp_path) as store:
        for tokens in (STEM, FORK, other):
            await store.insert(tokens)
        await store.spoil(store.slot(0))
        for tokens in (FORK, other, STEM):
            await store.insert(tokens, B)
        await store.remove(STEM[:10], B)
        for tokens in (FORK, other, STEM):
            assert await store.holders(tokens) == {}


async def test_a_removal_that_meets_a_damaged_origin_is_answered(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(STEM)
        await store.insert(FORK)
        await store.spoil(store.slot(0))
        assert await store.remove(FORK, A) == 0
        await store.insert(FORK, A)
        assert await store.remove(FORK, A) > 0
        assert await store.holders(FORK) == {}


@pytest.mark.parametrize("windows", [(0,), (1,), (3,), (1, 2), (0, 1, 2, 3)])
async def test_damaged_ancestors_heal_under_their_old_ids(tmp_path: Path, windows: tuple[int, ...]) -> None:
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.insert(LONG, B)
        slots = [store.slot(window) for window in windows]
        await store.spoil(*slots)
        assert await store.holders(LONG) == {name: windows[0] * 64 for name in "ab" if windows[0]}
        segments = store.index.statistics().segments
        assert await store.remove(LONG, Worker("c")) == 0
        assert await store.insert(LONG, B) == 0
        before = {"a": windows[0] * 64} if windows[0] else {}
        assert await store.holders(LONG) == before | {"b": 300}
        assert store.index.statistics().segments == segments
        await store.insert(LONG, A)
        assert await store.holders(LONG) == {"a": 300, "b": 300}
        await store.index.validate()


async def test_an_ancestor_heals_also_where_the_insert_holds_nothing_of_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.spoil(store.slot(2))
        assert await store.insert(LONG, B, first=250) == 0  # does not look so far down
        assert await store.insert(LONG, B, first=140) == 0
        assert await store.insert(LONG, B, first=10) == 0
        assert await store.holders(LONG) == {"a": 128}
        await store.index.validate()


async def test_an_ancestor_is_not_healed_where_another_segment_has_its_blocks(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.spoil(store.slot(0))
        await store.insert(STEM, B)  # cannot know what the damaged one held
        await store.insert(LONG, B)
        assert await store.holders(LONG) == {"b": 300}
        await store.remove(STEM[:1], B)
        assert await store.holders(STEM) == {}
        assert await store.holders(LONG) == {}


async def test_a_healed_segment_is_registered_where_it_was_left_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.spoil(store.slot(1))
        directory = store.index.state.directory
        for posting in directory.postings():
            if posting[3] == store.slot(1):
                directory.discard_posting(*posting)
        await store.insert(LONG, B)
        await store.index.validate()


async def test_an_insert_that_is_refused_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as store:
        await store.insert((7, 7, 7), B)
        lsn, workers = store.index.store.lsn, store.index.state.workers
        monkeypatch.setattr(limits, "WORKERS_MAX", 1)
        with pytest.raises(TooLargeError):
            await store.insert(FORK, A)
        assert (workers.count, workers.generation(0), store.index.store.lsn) == (1, 0, lsn)


async def test_a_newer_generation_ends_what_was_held_also_in_the_segments_it_changes(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(STEM, A)
        await store.insert(STEM, B)
        await store.insert(STEM[:20], B, generation=1)
        assert await store.holders(STEM) == {"a": 60, "b": 20}
        await store.index.validate()
        assert await store.index.remove(store.namespace, chained_block_ids(STEM), worker=B, first=10, generation=2) == 1
        assert await store.holders(STEM) == {"a": 60}
        await store.index.validate()
