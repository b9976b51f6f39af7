"""Routers and shards start from what they kept, and go on, when no coordinator is there (design §7)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sarp_cluster.client import AsyncClient, NotNowError
from tests.cluster.services import services


async def test_a_cluster_starts_without_its_coordinator_and_answers(tmp_path: Path) -> None:
    sequences = [[root * 100 + number for number in range(1, 12)] for root in range(12)]
    async with (
        services(tmp_path, shards=3) as one,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        namespace = await client.namespace("m", hash_profile="opaque")
        await client.register_worker("w")
        await client.register_worker("cleared")
        for ids in sequences:
            await client.insert(namespace, worker="w", block_ids=ids)
            await client.insert(namespace, worker="cleared", block_ids=ids)
        await client.clear_worker("cleared")
    async with (
        services(tmp_path, shards=3, coordinators=False) as one,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        for ids in sequences:
            answer = await client.match(namespace, block_ids=[*ids, 7], deadline_ms=2_000)
            assert (answer.matched_blocks, answer.complete) == (11, True)
            assert [held.worker for held in answer.workers] == ["w"]
        # Nobody grants a lease: what would be a promise is refused, and at once.
        with pytest.raises(NotNowError) as refused:
            await client.insert(namespace, worker="w", block_ids=sequences[0])
        assert (refused.value.code, refused.value.outcome) == ("no_lease", "not_applied")
        with pytest.raises(NotNowError) as refused:
            await client.register_worker("new")
        assert refused.value.code == "unavailable"


async def test_a_shard_alone_does_not_answer_what_it_may_have_missed(tmp_path: Path) -> None:
    """One of three: the two others may have been told that a worker's cache is empty."""
    async with services(tmp_path, shards=3):
        pass
    async with services(tmp_path, shards=3, coordinators=False, only=["shard-1"], wait=False) as one:
        shard = one.shards[0]
        async with asyncio.timeout(10):
            while "waiting for the coordinator" not in (shard.ready() or ""):
                await asyncio.sleep(0.01)
        assert shard.blocks.index is None
