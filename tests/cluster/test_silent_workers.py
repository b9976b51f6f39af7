"""Workers that say nothing any more are left out of answers, until they are heard again (design §6)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sarp_cluster.client import AsyncClient, Namespace
from tests.cluster.services import services

IDS = list(range(1, 20))


async def holders(client: AsyncClient, namespace: Namespace) -> list[str]:
    answer = await client.match(namespace, block_ids=IDS, deadline_ms=2_000)
    return [one.worker for one in answer.workers]


async def until(client: AsyncClient, namespace: Namespace, wanted: list[str]) -> None:
    async with asyncio.timeout(15):
        while await holders(client, namespace) != wanted:
            await asyncio.sleep(0.02)


async def test_a_worker_is_left_out_while_it_is_silent(tmp_path: Path) -> None:
    async with (
        services(tmp_path) as one,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        namespace = await client.namespace("m", hash_profile="opaque")
        await client.register_worker("beats", heartbeat_ttl_ms=2_500)
        await client.register_worker("quiet")  # it sends none, and is never missed
        for worker in ("beats", "quiet"):
            await client.insert(namespace, worker=worker, block_ids=IDS)
        async with client.heartbeats("beats", interval_s=0.2):
            await until(client, namespace, ["beats", "quiet"])
            await asyncio.sleep(0)
        await until(client, namespace, ["quiet"])
        assert {one.worker: one.state for one in await client.workers()}["quiet"] == "live"
        await client.heartbeat("beats")
        await until(client, namespace, ["beats", "quiet"])


async def test_who_drains_or_is_gone_is_left_out(tmp_path: Path) -> None:
    async with (
        services(tmp_path) as one,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        namespace = await client.namespace("m", hash_profile="opaque")
        for worker in ("a", "b", "c"):
            await client.register_worker(worker)
            await client.insert(namespace, worker=worker, block_ids=IDS)
        assert await holders(client, namespace) == ["a", "b", "c"]
        await client.drain_worker("b")
        assert await holders(client, namespace) == ["a", "c"]
        await client.deregister_worker("a")
        assert await holders(client, namespace) == ["c"]
        await client.register_worker("b")
        assert await holders(client, namespace) == ["b", "c"]
        # Whoever was gone comes back with an empty cache.
        again = await client.register_worker("a")
        assert again.generation == 1
        assert await holders(client, namespace) == ["b", "c"]


async def test_a_purged_tenant_has_nothing(tmp_path: Path) -> None:
    async with (
        services(tmp_path) as one,
        AsyncClient(f"sarp://127.0.0.1:{one.ports.routers[0][1]}", direct=True) as direct,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        namespace = await client.namespace("m", hash_profile="opaque")
        await client.register_worker("w")
        await client.insert(namespace, worker="w", block_ids=IDS)
        assert await holders(client, namespace) == ["w"]
        same = await direct.namespace("m", hash_profile="opaque")
        assert await holders(direct, same) == ["w"]
        assert await client.purge_tenant("default") == 1
        assert await holders(client, namespace) == []
        assert await holders(direct, same) == []
        await client.insert(namespace, worker="w", block_ids=IDS[:5])
        assert await holders(client, namespace) == ["w"]
    async with (
        services(tmp_path) as one,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        answer = await client.match(namespace, block_ids=IDS, deadline_ms=2_000)
        assert answer.matched_blocks == 5
