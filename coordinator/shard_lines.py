"""The coordinator's lines to the shards: one stream to each, over which it probes and commands (design §7)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable

from coordinator.tracked_shard import TrackedShard
from sarp_cluster import limits
from sarp_cluster.cluster.view import split_address
from sarp_cluster.errors import SarpError
from sarp_cluster.wire import control
from sarp_cluster.wire.stream_client import Peer


class ShardLine:
    """One shard."""

    def __init__(self, shard: TrackedShard, hello: Callable[[], control.Hello], tls: ssl.SSLContext | None) -> None:
        self._shard = shard
        self._to = ""
        self.peer = Peer(self._address, hello, tls=tls)

    def _address(self) -> tuple[str, int] | None:
        self._to = self._shard.stream
        return split_address(self._shard.stream)

    def moved(self) -> None:
        """The shard is another process, or elsewhere: what is open may lead to the one before."""
        if self._to != self._shard.stream and self.peer.client is not None:
            self.peer.client.close()
        self.peer.reconnect()

    @property
    def known(self) -> bool:
        """Has the shard said where it is?"""
        return split_address(self._shard.stream) is not None

    async def probe(self) -> bool:
        """Is it well? Whoever has its address now and is somebody else is not."""
        limit_s = limits.PROBE_MS / 1000
        try:
            async with asyncio.timeout(limit_s):
                await self.peer.wait_connected()
                reply = await self.peer.call("probe", control.ProbeRequest(), control.ProbeReply, limit_s)
        except (SarpError, TimeoutError):
            return False
        return reply.node == self._shard.name


class ShardLines:
    """All shards. `probed` is called with the name and whether it answered, each PROBE_MS."""

    def __init__(
        self,
        hello: Callable[[], control.Hello],
        probed: Callable[[str, bool], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hello = hello
        self._tls = tls
        self._probed = probed
        self._lines: dict[str, ShardLine] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # two a shard

    def know(self, shards: Iterable[TrackedShard]) -> None:
        """Have a line to each of these that has joined."""
        for shard in shards:
            if shard.stream and shard.name not in self._lines:
                line = self._lines[shard.name] = ShardLine(shard, self._hello, self._tls)
                for work in (line.peer.run(), self._keep_probing(shard.name, line)):
                    self._tasks.add(asyncio.get_running_loop().create_task(work))

    def peer(self, name: str) -> Peer | None:
        """The line to a shard."""
        line = self._lines.get(name)
        return None if line is None else line.peer

    def moved(self, name: str) -> None:
        """A shard is another process, or elsewhere."""
        line = self._lines.get(name)
        if line is not None:
            line.moved()

    async def _keep_probing(self, name: str, line: ShardLine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            if split_address(line._shard.stream) is not None:  # its own line
                self._probed(name, await line.probe())
            await asyncio.sleep(max(0.0, began + limits.PROBE_MS / 1000 - loop.time()))

    async def run(self) -> None:
        """Until one of the lines fails in a way that is a bug."""
        while True:
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                task.result()
            await asyncio.sleep(limits.PROBE_MS / 1000)

    async def close(self) -> None:
        """Let go of all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
