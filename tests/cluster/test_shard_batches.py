"""Batches at a shard: what comes behind a change that was not done."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from sarp_cluster.client import AsyncClient, insert_request
from sarp_cluster.types import InsertResult
from sarp_cluster.wire import messages
from sarp_cluster.wire.codec import decode
from shard.index import Index
from tests.cluster.services import services


async def test_behind_a_change_that_may_come_again_its_worker_is_not_overtaken(tmp_path: Path) -> None:
    """The first change of w is slow; sent again with its seq it must not be taken for a repetition."""
    async with services(tmp_path, shards=1) as one:
        shard = one.shards[0]
        async with AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client:
            namespace = await client.namespace("m", hash_profile="opaque")
            for worker in ("w", "x"):
                await client.register_worker(worker)
            items = [
                insert_request(namespace, worker="w", block_ids=[1, 2], seq=1, deadline_ms=20),
                insert_request(namespace, worker="w", block_ids=[3, 4], seq=2),
                insert_request(namespace, worker="x", block_ids=[5, 6], seq=1),
            ]
            go_on = asyncio.Event()
            real = Index.insert

            async def slow(self: Index, *arguments: Any, **named: Any) -> InsertResult:
                if named["seq"] == 1 and named["worker"].instance_id == "w":
                    await go_on.wait()
                return await real(self, *arguments, **named)

            principal = shard.authenticator.authenticate("")
            with patch.object(Index, "insert", slow):
                reply = await shard.blocks.batch(principal, messages.BatchRequest(items=list(items)))
            first, second, third = reply.results
            assert decode(first, messages.ErrorReply).error.outcome == "unknown"
            refused = decode(second, messages.ErrorReply).error
            assert (refused.code, refused.outcome) == ("conflict", "not_applied")
            assert decode(third, messages.InsertReply).durable
            go_on.set()
            again = await client.batch(items)
            assert [one.applied for one in again if isinstance(one, messages.InsertReply)][1] is True
            for ids in ([1, 2], [3, 4], [5, 6]):
                answer = await client.match(namespace, block_ids=ids, deadline_ms=2_000)
                assert answer.matched_blocks == 2, msgspec.to_builtins(answer)
