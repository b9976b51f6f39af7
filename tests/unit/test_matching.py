"""Searches that a list of more candidates than are ranked at once could lead astray."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

OTHERS = 60
"""More than three times the candidates that one step ranks."""


@pytest.mark.parametrize("place", [0, 17, 40, OTHERS])
async def test_the_longest_candidate_is_found_wherever_it_stands_in_a_long_list(tmp_path: Path, place: int) -> None:
    """Without filters all candidates look alike; those ranked first are shorter than what was verified already."""
    config = IndexConfig(filter=False, refine=False, prune=True, pruning_threshold=1_000, retrieval_max=None)
    index = await Index.open(tmp_path, config, secret=bytes(32))
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    wanted = chained_block_ids((1,) * 60)
    for number in range(OTHERS + 1):
        if number == place:
            await index.insert(namespace, wanted, worker=Worker("w"))
        else:
            # Every third one matches further than the others' ends.
            tokens = (1, 1, 1, 5 + number) if number % 3 == 0 else (1, 5 + number)
            await index.insert(namespace, chained_block_ids(tokens), worker=Worker("w"))
    before = index.statistics()
    assert (await index.match(namespace, wanted)).matched_blocks == 60
    longer = chained_block_ids((1,) * 62)
    again = await index.insert(namespace, longer, worker=Worker("w"))
    assert again.blocks_added == 2  # an extension, not a second copy
    assert index.statistics().segments == before.segments
    await index.validate()
    await index.close()
