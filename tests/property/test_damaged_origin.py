"""A damaged origin: what design §4 promises (an insert that meets it heals it) and what a refused insert may change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sarp_cluster.errors import CorruptRecordError
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, Namespace, NamespaceSpec, Worker
from shard.index import Index

STEM = tuple(range(60))
FORK = (*STEM[:50], 99, 99, 99)


async def damaged(directory: Path) -> tuple[Index, Namespace]:
    """An index whose first segment, the origin of a second one, cannot be read."""
    index = await Index.open(directory, secret=bytes(32))
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    await index.insert(namespace, chained_block_ids(STEM), worker=Worker("a"))
    await index.store.sync()

    def spoil(at: int) -> None:
        file = directory / log_file_name(1)
        data = bytearray(file.read_bytes())
        data[at] ^= 0xFF
        file.write_bytes(data)

    at = index.statistics().disk_bytes - 100
    await index.insert(namespace, chained_block_ids(FORK), worker=Worker("a"))
    await index.store.sync()
    await asyncio.to_thread(spoil, at)
    return index, namespace


@pytest.mark.xfail(strict=True, raises=CorruptRecordError, reason="not healed: every insert under it fails for good")
async def test_an_insert_that_meets_a_damaged_origin_heals_it(tmp_path: Path) -> None:
    index, namespace = await damaged(tmp_path / "log")
    try:
        await index.insert(namespace, chained_block_ids(STEM), worker=Worker("b"))
        await index.insert(namespace, chained_block_ids(FORK), worker=Worker("b"))
        assert (await index.match(namespace, chained_block_ids(FORK))).matched_blocks == len(FORK)
    finally:
        await index.close()


@pytest.mark.xfail(strict=True, reason="the generation is entered before the plan that may be refused")
async def test_an_insert_that_is_refused_leaves_the_generation_as_it_was(tmp_path: Path) -> None:
    index, namespace = await damaged(tmp_path / "log")
    try:
        await index.insert(namespace, chained_block_ids((7, 7, 7)), worker=Worker("b"))
        with pytest.raises(CorruptRecordError):
            await index.insert(namespace, chained_block_ids(FORK), worker=Worker("b"), generation=1)
        assert (await index.match(namespace, chained_block_ids((7, 7, 7)))).matched_blocks == 3
    finally:
        await index.close()
