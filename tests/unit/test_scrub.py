"""The scrub: all segments, at its pace, and again after a pause."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sarp_cluster import limits
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index


async def test_a_round_reads_every_segment_once_and_counts_those_that_have_rotted(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "store", secret=bytes(32))
    await index.stop_background()
    scrub = index.background.scrub
    try:
        namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
        await index.insert(namespace, chained_block_ids(tuple(range(64 * 100))), worker=Worker("w"))
        await index.store.sync()

        def rot() -> None:
            file = tmp_path / "store" / log_file_name(1)
            data = bytearray(file.read_bytes())
            data[20_000] ^= 1
            file.write_bytes(data)

        await asyncio.to_thread(rot)
        now, steps = 1_000.0, 0
        while scrub.damaged is None:
            wait_s = scrub.wait_s(now)
            assert wait_s is not None
            now += wait_s
            assert scrub.wait_s(now) == 0
            await scrub.step(now)
            steps += 1
        assert scrub.segments_read == 100
        assert scrub.damaged == 1
        assert index.statistics().damaged_segments == 2, "it was read once more before anything is given up"
        assert steps == -(-100 // limits.BACKFILL_SEGMENTS_A_STEP)
        assert now - 1_000 > 60 / limits.SCRUB_SEGMENTS_A_SECOND
        assert scrub.wait_s(now) == limits.SCRUB_PAUSE_S
    finally:
        await index.close()


async def test_it_waits_until_everything_is_in_memory(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "store", secret=bytes(32))
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    for begin in range(20):
        tokens = tuple(range(begin << 32, (begin << 32) + 64 * 1_000))
        await index.insert(namespace, chained_block_ids(tokens), worker=Worker("w"), durable=False)
    await index.snapshot()
    await index.close()
    index = await Index.open(tmp_path / "store", secret=bytes(32))
    await index.stop_background()
    try:
        assert index.statistics().unloaded_chunks > 0
        assert index.background.scrub.wait_s(0.0) is None
        await index.load_all()
        assert index.background.scrub.wait_s(0.0) == 0
    finally:
        await index.close()
