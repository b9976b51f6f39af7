"""One turn of the loop sends its frames together, and a request that waits holds up nobody behind it (design §3)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from unittest.mock import patch

from sarp_cluster.wire import messages
from sarp_cluster.wire.auth import Authenticator, Principal
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.control import Hello
from sarp_cluster.wire.service import Handler
from sarp_cluster.wire.stream_client import StreamClient
from sarp_cluster.wire.stream_server import StreamConnection, StreamServer


class Node:
    """Matches of the namespace "cold" wait until they are let go; others are answered at once."""

    node, cluster = "n", "c"

    def __init__(self) -> None:
        self.authenticator = Authenticator()
        self.go_on = asyncio.Event()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"match": self.match}

    async def match(self, _: Principal, request: messages.MatchRequest) -> messages.MatchReply:
        if request.namespace == "cold":
            await self.go_on.wait()
        return messages.MatchReply(
            matched_blocks=len(request.namespace),
            matched_tokens=0,
            workers=[],
            truncated=False,
            complete=True,
            degraded=[],
            epoch=1,
        )

    def ready(self) -> str | None:
        return None

    def metrics(self) -> str:
        return ""

    def page(self) -> str:
        return ""


async def test_a_cold_match_does_not_delay_what_comes_behind_it() -> None:
    node = Node()
    server = await StreamServer.start(node, "127.0.0.1", 0)
    client = await StreamClient.connect(*server.address, Hello(version=1))
    cold = client.send("match", messages.MatchRequest(namespace="cold", block_ids=b""))
    for number in range(1, 200):
        raw = await client.request("match", messages.MatchRequest(namespace="x" * number, block_ids=b""))
        assert decode(raw, messages.MatchReply).matched_blocks == number
    assert not cold.done()
    node.go_on.set()
    assert decode(await cold, messages.MatchReply).matched_blocks == len("cold")
    client.close()
    await server.close()


async def test_frames_of_one_turn_go_together() -> None:
    """Both ways: many requests of one turn are few writes, and so are their answers."""
    server = await StreamServer.start(Node(), "127.0.0.1", 0)
    client = await StreamClient.connect(*server.address, Hello(version=1))
    flushes = 0
    real = StreamConnection._flush

    def counted(self: StreamConnection) -> None:
        nonlocal flushes
        flushes += bool(self._out)
        real(self)

    with patch.object(StreamConnection, "_flush", counted):
        sent = [client.send("match", messages.MatchRequest(namespace="hot", block_ids=b"")) for _ in range(60)]
        assert len(client._out) == 60
        await asyncio.gather(*sent)
    assert flushes <= 3
    client.close()
    await server.close()
