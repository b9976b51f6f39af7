"""A node's line to the coordinator: heartbeats, the lease, and news (design §7).

Shards and routers have one each. With several coordinators it asks one after the other until it finds the leader.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from sarp_cluster import limits
from sarp_cluster.cluster.view import Address, ClusterView
from sarp_cluster.errors import SarpError
from sarp_cluster.wire.control import FetchRequest, HeartbeatReply, Hello, NodeAddress, View
from sarp_cluster.wire.stream_client import Peer

logger: Final = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = limits.HEARTBEAT_MS / 1000 * 3

HURRIED_S: Final = 0.02
"""From one heartbeat to the next at least, however much hurry there is: callers can make some."""


class Reporting(Protocol):
    """What the line needs of its node."""

    @property
    def view(self) -> ClusterView:
        """What it knows of the cluster."""

    def report(self) -> tuple[str, Any]:
        """Operation and message of the next heartbeat."""

    def heard(self, reply: HeartbeatReply, sent_at: float) -> None:
        """The coordinator answered a heartbeat that was sent at this time of the loop."""

    async def take(self, view: View) -> None:
        """Take over what is newer."""


def wanted(view: ClusterView) -> FetchRequest:
    """Asks for what is newer than a view."""
    return FetchRequest(epoch=view.epoch, nonce=view.nonce, number=view.number)


def note_addresses(view: ClusterView, nodes: Iterable[NodeAddress]) -> bool:
    """Enter where shards are, and how they do; was anything of it new?"""
    news = {node.shard: Address(node.http, node.stream, node.incarnation, node.state) for node in nodes}
    changed = any(view.addresses.get(shard) != address for shard, address in news.items())
    view.addresses.update(news)
    return changed


class CoordinatorLine:
    """The line. `run` keeps it."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        hello: Callable[[], Hello],
        node: Reporting,
        *,
        tls: ssl.SSLContext | None = None,
        interval_s: float = limits.HEARTBEAT_MS / 1000,
    ) -> None:
        self._addresses = list(addresses)
        self._at = 0
        self._node = node
        self._interval_s = interval_s
        self._now = asyncio.Event()
        self.peer = Peer(self._address, hello, tls=tls)
        self.heard_at: float | None = None
        """Loop time at which the leader answered last."""

    def _address(self) -> tuple[str, int] | None:
        return self._addresses[self._at % len(self._addresses)] if self._addresses else None

    def hurry(self) -> None:
        """Send the next heartbeat now: this node's state has changed."""
        self._now.set()

    async def run(self) -> None:
        """Keep it, for ever."""
        if not self._addresses:
            await asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.peer.run())
            group.create_task(self._beat())

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        hurried = False
        while True:
            self._now.clear()
            began = loop.time()
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self.peer.wait_connected()
                sent_at = loop.time()
                name, message = self._node.report()
                reply = await self.peer.call(name, message, HeartbeatReply, CALL_TIMEOUT_S)
                if reply.leading:
                    self.heard_at = loop.time()
                    self._node.heard(reply, sent_at)
                    lacking = self._node.view.behind(reply.epoch, reply.number)
                    if lacking:
                        await self._node.take(
                            await self.peer.call("fetch", wanted(self._node.view), View, CALL_TIMEOUT_S)
                        )
                    # A shard that has all there is may serve once the coordinator has said so. No two heartbeats in a
                    # row are hurried for that, however fast things change.
                    hurried = lacking and not hurried and not self._node.view.behind(reply.epoch, reply.number)
                    if hurried:
                        self.hurry()
                else:
                    self._next_coordinator()
            except (SarpError, TimeoutError) as error:
                logger.debug("no heartbeat: %s", error)
                self._next_coordinator()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._now.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(max(0.0, began + HURRIED_S - loop.time()))

    def _next_coordinator(self) -> None:
        if len(self._addresses) > 1:
            self._at += 1
            if self.peer.client is not None:
                self.peer.client.close()
            self.peer.reconnect()
