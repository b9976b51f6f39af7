"""How often a lost connection is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.forwarding import ShardLink
from sarp_cluster import limits
from sarp_cluster.cluster.view import Address, ClusterView
from sarp_cluster.wire.control import PROTOCOL_VERSION, Hello
from sarp_cluster.wire.stream_client import Peer
from tests.crash.virtual_time import run

HELLO = Hello(version=PROTOCOL_VERSION)
SECONDS = 20


class Looked(dict[str, Address]):
    """Addresses of nobody; counts who looks."""

    count = 0

    def get(self, *_: object) -> None:  # type: ignore[override]
        self.count += 1


async def tries(make: Callable[[Looked], Peer]) -> int:
    """How often an address is looked up, to connect to it."""
    looked = Looked()
    peer = make(looked)
    running = asyncio.create_task(peer.run())
    await asyncio.sleep(SECONDS)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return looked.count


@pytest.mark.parametrize("pause_ms", [50, limits.RECONNECT_MS_MAX])
def test_pauses_grow_up_to_the_longest(pause_ms: int) -> None:
    count = run(
        lambda: tries(lambda looked: Peer(lambda: looked.get("s"), lambda: HELLO, reconnect_ms_max=pause_ms)),
    )
    assert count == pytest.approx(SECONDS * 1000 / pause_ms, rel=0.15)


def test_a_router_looks_for_a_shard_that_is_back_more_often_than_that() -> None:
    def link(looked: Looked) -> Peer:
        view = ClusterView()
        view.addresses = looked
        return ShardLink("s", view, HELLO).peer

    assert run(lambda: tries(link)) == pytest.approx(SECONDS * 1000 / limits.SHARD_RECONNECT_MS_MAX, rel=0.15)
