"""A back-fill whose step is cancelled while it reads loses none of the segments it was about to register."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sarp_cluster.config import IndexConfig
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index
from tests.property import scenarios
from tests.property.scheduling import reads_wait

CONFIG = IndexConfig(segment_blocks=8, base_points=2, refinement_threshold=2, pruning_threshold=1, retrieval_max=None)


async def test_a_cancelled_step_is_done_again(tmp_path: Path) -> None:
    # Without the index's own background task: each step here is the test's, so that it is this one that is cancelled.
    index = await Index.open(tmp_path / "log", CONFIG, secret=scenarios.SECRET)
    await index.stop_background()
    try:
        namespace = index.create_namespace(NamespaceSpec(tenant="t", model="m", hash_profile=HashProfile.OPAQUE))
        sequences = [chained_block_ids((0, 0, 0, 0, 0, 0, token, token)) for token in range(6)]
        for block_ids in sequences:
            await index.insert(namespace, block_ids, worker=Worker("w"))
        await index.validate()
        assert index.background.backfills_pending
        with reads_wait(index):
            while index.background.backfills_pending:
                step = asyncio.create_task(index.backfill_step())
                await asyncio.sleep(0)  # it lists segments and waits for their records
                step.cancel()
                await asyncio.wait([step])
                await index.backfill_step()
        await index.validate()
        for block_ids in sequences:
            assert (await index.match(namespace, block_ids)).verified_blocks == 8
    finally:
        await index.close()
