"""A change that comes late, behind newer ones of its worker, brings nothing back: not in one of its parts either."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.cluster.view import split_address
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.coordination import HURRIED_S
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.stream_client import StreamClient
from tests.cluster.test_router_batches import KEY, chained, matched, prepared
from tests.local_cluster import local_cluster


@pytest.mark.parametrize("name", ["insert", "remove"])
async def test_a_change_in_parts_that_is_overtaken_changes_nothing_more(tmp_path: Path, name: str) -> None:
    cut = chained("cut", 128)
    async with local_cluster(tmp_path, splits={KEY.internal_id(cut[:8], 0): 64}) as cluster:
        client, namespace = await prepared(cluster)
        index = cluster.shards["s0"].life.index
        assert index is not None
        real, held, arrived = getattr(index, name), asyncio.Event(), asyncio.Event()
        calls = 0

        async def wait_in_the_first_part(*args: Any, **fields: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                arrived.set()
                await held.wait()
            return await real(*args, **fields)

        setattr(index, name, wait_in_the_first_part)
        change: dict[str, Any] = {"namespace": namespace, "block_ids": cut, "worker": "w"}
        insert, remove = messages.InsertRequest(**change, seq=2), messages.RemoveRequest(**change, seq=2)
        late, newer = (insert, remove) if name == "insert" else (remove, insert)
        late.seq = 1
        waiting = client.send(name, late)
        await arrived.wait()
        await client.request("remove" if name == "insert" else "insert", newer)
        held.set()
        await waiting
        assert calls == 2, "both parts came"
        assert await matched(client, namespace, cut) == (0 if name == "insert" else 128)
        client.close()


async def test_a_caller_cannot_make_a_shard_talk_to_its_coordinator_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who claims to know of changes that the shard has not heard of makes it ask; not more often than is good."""
    async with local_cluster(tmp_path) as cluster:
        beats = 0
        real = cluster.coordinator.heartbeat

        async def count(*asked: Any) -> Any:
            nonlocal beats
            beats += 1
            return await real(*asked)

        monkeypatch.setattr(cluster.coordinator, "heartbeat", count)
        client, namespace = await prepared(cluster)
        place = split_address(cluster.shards["s0"].life.stream_address)
        assert place is not None
        shard = await StreamClient.connect(*place, control.Hello(version=1))
        request = messages.MatchRequest(namespace=namespace, block_ids=bytes(8), number=2**62)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(300):
            with pytest.raises(RemoteError, match="recovering"):
                await shard.request("match", request)
        # The router beats, too, once a second.
        assert beats <= (loop.time() - began) * (1 / HURRIED_S + 2) + 4
        shard.close()
        client.close()
