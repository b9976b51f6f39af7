"""Damaged segments: matches get shorter. Changes that meet them heal them: no block gets two homes.

More of it, with small segments: tests/crash/test_healing.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

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

    async def holders(self, tokens: tuple[int, ...]) -> dict[str, int]:
        answer = await self.index.match(self.namespace, chained_block_ids(tokens))
        stepwise = await self.index.match(self.namespace, chained_block_ids(tokens), strategy="stepwise")
        assert answer.matched_blocks == stepwise.matched_blocks
        return {worker.instance_id: worker.remote for worker in answer.workers}

    async def spoil(self, window: int) -> None:
        """Damage the image of a window's first segment on the disk."""
        await self.index.store.sync()
        table = self.index.state.table
        rows = [table.describe(slot) for slot in range(4_096, table.slots_end)]
        (place, *_) = [(row["image"] & 0xFFFFFFFF) << 3 for row in rows if row is not None and row["window"] == window]

        def flip() -> None:
            file = self.directory / log_file_name(1)
            data = bytearray(file.read_bytes())
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


async def test_of_a_damaged_origin_is_left_what_a_copy_has(tmp_path: Path) -> None:
    """Whoever held it is lost; what is behind the fork is stored again as if it were new."""
    async with opened(tmp_path) as store:
        for tokens in (STEM, FORK, (*FORK, *range(200))):
            await store.insert(tokens)
        await store.spoil(0)
        assert await store.holders(FORK) == {}
        assert await store.insert((*FORK, *range(200)), B) == 0
        assert await store.holders((*FORK, *range(200))) == {"b": 253}
        assert await store.insert(STEM, B) == 10
        assert await store.holders(STEM) == {"b": 60}
        await store.index.validate()


@pytest.mark.parametrize("windows", [(0,), (1,), (3,), (0, 1, 2, 3), (1, 3)])
async def test_a_damaged_ancestor_cuts_the_match_and_is_healed_by_the_next_insert(
    tmp_path: Path, windows: tuple[int, ...]
) -> None:
    """What it held is known, since block IDs are chained; who held it is lost."""
    held = {"a": 64 * windows[0]} if windows[0] else {}
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        for window in windows:
            await store.spoil(window)
        assert await store.holders(LONG) == held
        assert await store.insert(LONG, B) == 0
        assert await store.holders(LONG) == {"b": 300, **held}
        await store.index.validate()
        assert await store.index.remove(store.namespace, chained_block_ids(LONG), worker=A)
        assert await store.holders(LONG) == {"b": 300}
        await store.index.snapshot()
    async with opened(tmp_path) as store:
        assert await store.holders(LONG) == {"b": 300}
        await store.index.validate()


async def test_a_removal_heals_too(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.insert(LONG, B)
        await store.spoil(1)
        assert await store.index.remove(store.namespace, chained_block_ids(LONG), worker=A)
        assert await store.holders(LONG) == {"b": 64}
        await store.insert(LONG, B)
        assert await store.holders(LONG) == {"b": 300}
        await store.index.validate()


async def test_a_damaged_last_segment_is_stored_again(tmp_path: Path) -> None:
    """Nothing behind it tells what it held: it is taken out."""
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.spoil(4)
        assert await store.holders(LONG) == {"a": 256}
        assert await store.insert(LONG, B) == 44
        assert await store.holders(LONG) == {"b": 300, "a": 256}
        await store.index.validate()


async def test_what_does_not_meet_the_damage_goes_on(tmp_path: Path) -> None:
    other = tuple(range(1_000, 1_100))
    async with opened(tmp_path) as store:
        await store.insert(LONG)
        await store.spoil(1)
        assert await store.insert(other, B) == 100
        assert await store.insert(LONG, B, first=256) == 0
        assert await store.holders(other) == {"b": 100}
        assert await store.holders(LONG) == {"a": 64}
