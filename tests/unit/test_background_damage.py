"""A segment that is damaged cannot be folded: background work gives it up and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sarp_cluster.config import IndexConfig
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index


def spoil(directory: Path) -> None:
    file = directory / log_file_name(1)
    data = bytearray(file.read_bytes())
    data[100:] = bytes(byte ^ 0xFF for byte in data[100:])
    file.write_bytes(data)


async def test_background_work_ends_where_a_segment_with_a_delta_is_damaged(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "log", IndexConfig(delta_segments_max=0), secret=bytes(32))
    await index.stop_background()
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    tokens = tuple(range(60))
    await index.insert(namespace, chained_block_ids(tokens), worker=Worker("w"))
    await index.insert(namespace, chained_block_ids((*tokens, 60)), worker=Worker("w"), first=60)
    assert index.statistics().deltas_unfolded == 1
    await index.store.sync()
    await asyncio.to_thread(spoil, tmp_path / "log")
    try:
        async with asyncio.timeout(5):
            await index.drain_backfill()
        # What comes after it is folded all the same.
        await index.insert(namespace, chained_block_ids((9, *tokens)), worker=Worker("w"))
        await index.insert(namespace, chained_block_ids((9, *tokens, 1)), worker=Worker("w"), first=61)
        async with asyncio.timeout(5):
            await index.drain_backfill()
        assert index.statistics().deltas_unfolded == 1
    finally:
        await index.close()
