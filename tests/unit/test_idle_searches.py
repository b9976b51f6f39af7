"""Many matches at once leave no more searches behind than the index keeps for their buffers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index
from shard.state import IDLE_MAX
from tests.property.scheduling import reads_wait


async def test_a_burst_of_matches_does_not_keep_its_buffers(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "log", secret=bytes(32))
    try:
        namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
        block_ids = chained_block_ids(range(70))
        await index.insert(namespace, block_ids, worker=Worker("w"))
        with reads_wait(index):
            await asyncio.gather(*(index.match(namespace, block_ids) for _ in range(4 * IDLE_MAX)))
            await asyncio.gather(*(index.insert(namespace, block_ids, worker=Worker("w")) for _ in range(4 * IDLE_MAX)))
        assert len(index.state.idle_searches) <= IDLE_MAX
        assert len(index.state.idle_insertions) <= IDLE_MAX
    finally:
        await index.close()
