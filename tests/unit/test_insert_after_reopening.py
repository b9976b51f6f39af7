"""Inserts into an index that was opened from a snapshot a moment ago, of which nearly nothing is in memory yet."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index
from tests.crash.virtual_time import run

CONFIG = IndexConfig(
    segment_blocks=4,
    base_points=2,
    refinement_threshold=4,
    pruning_threshold=2,
    retrieval_max=None,
    snapshot_log_bytes=4_096,
    delta_segments_max=8,
    log_file_bytes=4_096,
)
SPEC = NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE)
WORKER = Worker("w")
OPENINGS = 6
INSERTS = 8


@pytest.mark.parametrize("seed", [1, 5])
def test_inserts_find_what_a_snapshot_left_on_the_disk(tmp_path: Path, seed: int) -> None:
    run(lambda: reopen_and_insert(tmp_path, seed), seed)


async def reopen_and_insert(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    reference = ReferenceIndex()
    known: list[tuple[int, ...]] = [()]
    for _ in range(OPENINGS):
        index = await Index.open(tmp_path / "store", CONFIG, secret=bytes(32))
        namespace, reference_namespace = index.create_namespace(SPEC), reference.create_namespace(SPEC)
        for _ in range(INSERTS):
            base = rng.choice(known)
            tokens = base[: rng.randint(0, len(base))] + tuple(rng.randrange(3) for _ in range(rng.randint(1, 20)))
            known.append(tokens)
            reference.insert(reference_namespace, chained_block_ids(tokens), worker=WORKER)
            await index.insert(namespace, chained_block_ids(tokens), worker=WORKER)
        for tokens in known:
            wanted = reference.match(reference_namespace, chained_block_ids(tokens))
            assert Answer.of(await index.match(namespace, chained_block_ids(tokens))) == wanted
        await index.snapshot()
        await index.close()
