"""A shard that only talks to its coordinator: it is leased and probed, takes maps and changes, and fails as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from coordinator.app import CoordinatorService, CoordinatorSettings
from coordinator.control_loop import ControlLoop
from sarp_cluster.cluster.registry import Registry
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.cluster.view import ClusterView, join_address, split_address
from sarp_cluster.errors import RecoveringError
from sarp_cluster.wire import control, messages, view_replies
from sarp_cluster.wire.auth import Authenticator, Principal, node_token
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.node import NodeSettings
from sarp_cluster.wire.service import Handler
from sarp_cluster.wire.stream_client import StreamClient
from sarp_cluster.wire.stream_server import StreamServer
from tests.cluster.machine_driver import report

SECRET = b"0123456789abcdef"
WAIT_S = 20


class FakeShard:
    """A service with a view and nothing else."""

    def __init__(self, name: str) -> None:
        self.node = name
        self.cluster = ""
        self.authenticator = Authenticator([], node_token(SECRET))
        self.view = ClusterView(registry=Registry())
        self.state: control.NodeState = "serving"
        self.takes = asyncio.Event()
        """It takes what is installed; else it makes the coordinator wait."""
        self.takes.set()
        self.refuses = False
        self.commands: list[str] = []
        self.incarnation = "p1"
        self._server: StreamServer | None = None
        self._line: StreamClient | None = None
        self._stream = ""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "install": self.install,
            "fetch": self.fetch,
            "probe": self.probe,
            "snapshot_shard": self.command,
            "drain_shard": self.command,
        }

    def ready(self) -> str | None:
        return None

    def metrics(self) -> str:
        return ""

    def page(self) -> str:
        return ""

    async def install(self, _: Principal, request: control.InstallRequest) -> control.InstallReply:
        await self.takes.wait()
        if self.refuses:
            raise RecoveringError("not yet")
        packed = request.slot_map
        if packed is not None and (slot_map := SlotMap.unpacked(packed)).supersedes(self.view.slot_map):
            self.view.slot_map = slot_map
        self.view.registry.apply(request.entries, request.number)
        return control.InstallReply(epoch=self.view.epoch, nonce=self.view.nonce, number=self.view.number)

    async def fetch(self, _: Principal, request: control.FetchRequest) -> control.View:
        return view_replies.newer(self.view, request)

    async def probe(self, _: Principal, __: control.ProbeRequest) -> control.ProbeReply:
        return control.ProbeReply(
            node=self.node,
            incarnation=self.incarnation,
            state=self.state,
            epoch=self.view.epoch,
            number=self.view.number,
        )

    async def command(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        self.commands.append(request.shard)
        return messages.Done()

    # --- its side -----------------------------------------------------------------------------------------------------

    async def connect(self, coordinator: str) -> None:
        self._server = await StreamServer.start(self, "127.0.0.1", 0)
        self._stream = join_address(*self._server.address)
        address = split_address(coordinator)
        assert address is not None
        hello = control.Hello(version=1, credential=node_token(SECRET), node=self.node)
        self._line = await StreamClient.connect(*address, hello)

    async def ask(self, name: str, message: object) -> msgspec.Raw:
        assert self._line is not None
        async with asyncio.timeout(WAIT_S):
            return await self._line.request(name, message)

    async def beat(self) -> control.HeartbeatReply:
        """One heartbeat, with what it has."""
        message = report(
            self.node,
            incarnation=self.incarnation,
            state=self.state,
            epoch=self.view.epoch,
            nonce=self.view.nonce,
            number=self.view.number,
            stream=self._stream,
        )
        return decode(await self.ask("shard_heartbeat", message), control.HeartbeatReply)

    async def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._server is not None:
            await self._server.close()


class FakeCluster:
    """A coordinator's service in this loop, and fake shards that have joined it."""

    def __init__(self, service: CoordinatorService, shards: list[FakeShard]) -> None:
        self.service = service
        self.shards = shards
        self.stop = asyncio.Event()
        self.running: asyncio.Task[int] | None = None

    @property
    def term(self) -> ControlLoop:
        assert self.service.term is not None
        return self.service.term

    @property
    def address(self) -> str:
        assert self.service.addresses is not None
        return self.service.addresses.stream_address

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.service.run(self.stop))
        await self.until(lambda: self.service.addresses is not None)
        for shard in self.shards:
            await shard.connect(self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.set()
        assert self.running is not None
        for shard in self.shards:
            shard.takes.set()
        await self.running
        for shard in self.shards:
            await shard.close()

    async def until(self, condition: object) -> None:
        """Until something holds; fails with what ended the coordinator, if something did."""
        assert callable(condition)
        assert self.running is not None
        async with asyncio.timeout(WAIT_S):
            while not condition():
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.001)

    async def settle(self) -> None:
        """All shards have joined, and have the first map."""
        await self.until(lambda: self.service.term is not None)
        for shard in self.shards:
            await shard.beat()
        await self.until(lambda: all(shard.view.epoch for shard in self.shards))
        for shard in self.shards:
            await shard.beat()
        await self.until(self.term.settled)
        await self.until(lambda: all(one.state == "serving" for one in self.term.machine.shards.values()))


@asynccontextmanager
async def fake_cluster(directory: Path, count: int = 2, **more: object) -> AsyncIterator[FakeCluster]:
    """One with so many shards, which are expected."""
    settings = NodeSettings(
        node="coordinator-0",
        directory=directory / "coordinator",
        secret=SECRET,
        authenticator=Authenticator([], node_token(SECRET)),
    )
    service = CoordinatorService(settings, CoordinatorSettings(expected=count), **more)  # type: ignore[arg-type]
    async with FakeCluster(service, [FakeShard(f"s{number}") for number in range(count)]) as one:
        yield one
