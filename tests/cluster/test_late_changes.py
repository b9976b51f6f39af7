"""A change that comes late, behind newer ones of its worker, brings nothing back: not in one of its parts either."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.cluster.placement import placement_key
from sarp_cluster.wire import messages
from tests.cluster.test_router_batches import KEY, chained, matched, prepared
from tests.local_cluster import local_cluster


@pytest.mark.parametrize("name", ["insert", "remove"])
async def test_a_change_in_parts_that_is_overtaken_changes_nothing_more(tmp_path: Path, name: str) -> None:
    cut = chained("cut", 128)
    async with local_cluster(tmp_path, splits={placement_key(cut[:8], KEY): 64}) as cluster:
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
