"""A shard that lacks a change without a key that a router knows: answers wait for it, and are never from before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from sarp_cluster import limits
from sarp_cluster.types import HashProfile, Worker
from sarp_cluster.wire import messages
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.operations import SCOPES
from shard.app import ShardService
from tests.local_cluster import CONFIG, LocalCluster, local_cluster, until

ANYBODY = Principal("me", ["default"], SCOPES, "default")
IDS = bytes(range(80))


async def held_and_cleared(cluster: LocalCluster, *, deaf: bool = False) -> str:
    """A namespace with a worker that held something, of whose clear the router knows, and the shard does not yet.

    A deaf shard never hears of it.
    """
    router = cluster.routers[0]
    made = messages.NamespaceRequest(model="m", hash_profile=HashProfile.OPAQUE)
    namespace = (await router.keyless.create_namespace(ANYBODY, made)).namespace
    await router.keyless.register_worker(ANYBODY, messages.RegisterRequest(worker="w"))
    await router.blocks.insert(ANYBODY, messages.InsertRequest(namespace=namespace, block_ids=IDS, worker="w"))
    assert (await match(cluster, namespace)).matched_blocks == 10

    async def to_routers_only(**_: Any) -> None:
        view = cluster.coordinator.view
        await router._install(None, view.registry.entries(), view.number)

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    cluster.install = to_routers_only  # type: ignore[method-assign,assignment]
    for shard in cluster.shards.values() if deaf else ():
        shard.life.take = never  # type: ignore[method-assign,assignment]
    await router.keyless.clear_worker(ANYBODY, messages.ClearRequest(worker="w"))
    return namespace


async def match(cluster: LocalCluster, namespace: str, deadline_ms: int = 10_000) -> messages.MatchReply:
    request = messages.MatchRequest(namespace=namespace, block_ids=IDS, deadline_ms=deadline_ms)
    answer = await cluster.routers[0].blocks.match(ANYBODY, request)
    return decode(answer, messages.MatchReply) if isinstance(answer, msgspec.Raw) else answer


async def test_an_answer_waits_for_a_change_that_is_on_its_way(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        namespace = await held_and_cleared(cluster)
        answer = await match(cluster, namespace)
        assert (answer.matched_blocks, answer.complete) == (0, True)


async def test_so_does_a_change(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        namespace = await held_and_cleared(cluster)
        again = messages.InsertRequest(namespace=namespace, block_ids=IDS, worker="w", generation=1)
        await cluster.routers[0].blocks.insert(ANYBODY, again)
        assert (await match(cluster, namespace)).matched_blocks == 10


async def test_it_waits_half_its_time(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        namespace = await held_and_cleared(cluster, deaf=True)
        began = asyncio.get_running_loop().time()
        answer = await match(cluster, namespace, 400)
        assert (answer.matched_blocks, answer.complete, answer.degraded) == (0, False, ["recovering"])
        assert asyncio.get_running_loop().time() - began < 0.39


async def test_a_batch_waits_once_for_all_its_items(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        namespace = await held_and_cleared(cluster, deaf=True)
        one = messages.MatchRequest(namespace=namespace, block_ids=IDS, deadline_ms=200)
        reply = await cluster.routers[0].blocks.batch(ANYBODY, messages.BatchRequest(items=[one] * 20))
        answers = [decode(raw, messages.MatchReply) for raw in reply.results]
        assert [answer.degraded for answer in answers] == [["recovering"]] * 20


async def test_a_shard_that_was_away_serves_as_soon_as_it_has_fetched_what_it_missed(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        await cluster.stop("s0")
        cluster.shards.pop("s0")
        await cluster.routers[0].keyless.register_worker(ANYBODY, messages.RegisterRequest(worker="meanwhile"))
        shard = cluster.shards["s0"] = ShardService(cluster.settings("s0"), CONFIG)
        began = asyncio.get_running_loop().time()
        cluster._run("s0", shard)
        await until(lambda: shard.ready() is None)
        assert Worker("meanwhile", 0) in shard.view.registry.workers
        assert asyncio.get_running_loop().time() - began < limits.HEARTBEAT_MS / 1000 * 0.9
