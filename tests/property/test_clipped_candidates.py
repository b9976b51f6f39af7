"""Without a cap, candidates that end early do not hide a longer one that the walk has not reached yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index
from tests.property import scenarios

SHARED = (0,) * 8


@pytest.mark.parametrize(
    "config",
    [
        IndexConfig(retrieval_max=None, filter_stride=8, prune=True, refine=False, base_points=1),
        IndexConfig(retrieval_max=None, filter=False, refine=False, base_points=1),
    ],
    ids=["wide regions", "no filter"],
)
async def test_the_longest_is_found_behind_many_short_ones(tmp_path: Path, config: IndexConfig) -> None:
    index = await Index.open(tmp_path / "log", config, secret=scenarios.SECRET)
    try:
        namespace = index.create_namespace(NamespaceSpec(tenant="t", model="m", hash_profile=HashProfile.OPAQUE))
        # In the order of their slots, which is that of equal filters: one that matches nine blocks, many that end
        # there, and the one that matches twelve.
        sequences = [(*SHARED, 1, 5), *((*SHARED, 100 + number) for number in range(40)), (*SHARED, 1, 2, 3, 4)]
        for number, tokens in enumerate(sequences):
            await index.insert(namespace, chained_block_ids(tokens), worker=Worker(f"w{number}"))
        longest = chained_block_ids(sequences[-1])
        assert (await index.match(namespace, longest)).verified_blocks == 12
        blocks = index.statistics().blocks
        again = await index.insert(namespace, longest, worker=Worker("again"))
        assert again.blocks_added == 0
        assert index.statistics().blocks == blocks
        assert len((await index.match(namespace, longest)).workers) >= 2
    finally:
        await index.close()
