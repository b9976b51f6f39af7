"""A cluster in one event loop, on loopback: real shards and routers, and a coordinator that only says what it knows.

It grants every lease, numbers changes without a key and gives them to all nodes at once. Nothing fails by itself here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from router.app import RouterService
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.config import IndexConfig
from sarp_cluster.types import Event, HashProfile, NamespaceSpec, Worker
from sarp_cluster.wire import control, messages, view_replies
from sarp_cluster.wire.auth import Authenticator, Credential, Principal, digest, node_token
from sarp_cluster.wire.node import NodeSettings
from sarp_cluster.wire.operations import Scope
from sarp_cluster.wire.service import Handler
from sarp_cluster.wire.stream_server import StreamServer
from shard.app import ShardService

SECRET: Final = b"the secret of a cluster for tests"
NONCE: Final = b"nonce-of-a-test!"
CONFIG: Final = IndexConfig(retrieval_max=None)
"""No cap on reads: each answer is the longest there is."""


async def until(condition: Callable[[], object], turn: Callable[[], object] = lambda: None) -> None:
    """Wait for a condition; the test's own time limit ends it."""
    while not condition():
        turn()
        await asyncio.sleep(0.005)


def credential(name: str, *scopes: Scope, tenants: Sequence[str] = ("default",)) -> Credential:
    """A credential whose token is `token_of(name)`."""
    return Credential(name=name, sha256=digest(token_of(name)), tenants=list(tenants), scopes=list(scopes))


def token_of(name: str) -> str:
    return f"sarp_token-of-{name}"


class Coordinator:
    """A service that knows one slot map and a registry."""

    node = "coordinator"
    cluster = "cluster-for-tests"

    def __init__(self, cluster: LocalCluster, slot_map: SlotMap) -> None:
        self._all = cluster
        self.view = ClusterView(self.cluster, slot_map)
        self.authenticator = Authenticator([], node_token(SECRET))
        self.commands: list[str] = []

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "shard_heartbeat": self.heartbeat,
            "router_heartbeat": self.heartbeat,
            "fetch": self.fetch,
            "change": self.change,
            "cluster": self.describe,
            "events": self.events,
            "snapshot_shard": self.command,
            "drain_shard": self.command,
        }

    def ready(self) -> str | None:
        return None

    def metrics(self) -> str:
        return ""

    def page(self) -> str:
        return ""

    def nodes(self) -> list[control.NodeAddress]:
        return [
            control.NodeAddress(
                shard=name,
                incarnation=shard.life.incarnation,
                http=shard.life.http_address,
                stream=shard.life.stream_address,
                state="serving",
            )
            for name, shard in self._all.shards.items()
            if shard.life.stream_address
        ]

    async def heartbeat(self, _: Principal, __: Any) -> control.HeartbeatReply:
        return control.HeartbeatReply(
            lease_ms=60_000, epoch=self.view.epoch, number=self.view.number, nodes=self.nodes(), leading=True
        )

    async def fetch(self, _: Principal, request: control.FetchRequest) -> control.View:
        return view_replies.newer(self.view, request, self.nodes())

    async def change(self, _: Principal, request: control.ChangeRequest) -> control.ChangeReply:
        entry = self._entry(request.change, self.view.number + 1)
        self.view.registry.apply([entry])
        await self._all.install()
        return control.ChangeReply(entry=entry)

    def _entry(self, change: control.KeylessChange, number: int) -> Entry:
        match change:
            case control.NewNamespace():
                spec = NamespaceSpec(
                    tenant=change.tenant,
                    model=change.model,
                    lora=change.lora,
                    salt=change.salt,
                    block_size=change.block_size,
                    hash_profile=HashProfile(change.hash_profile),
                )
                return NamespaceEntry(number, change.id, spec)
            case control.NewWorker():
                known = self._worker(change.worker)
                generation = 0 if known is None else known.generation
                return WorkerEntry(
                    number,
                    change.worker.worker,
                    change.worker.dp_rank,
                    change.owner,
                    generation,
                    change.heartbeat_ttl_ms,
                )
            case control.ClearWorker():
                known = self._worker(change.worker)
                assert known is not None
                generation = known.generation + 1 if change.generation is None else change.generation
                return WorkerEntry(
                    number, known.instance_id, known.dp_rank, known.owner, generation, known.heartbeat_ttl_ms
                )
            case control.RetireWorker():
                known = self._worker(change.worker)
                assert known is not None
                return WorkerEntry(
                    number,
                    known.instance_id,
                    known.dp_rank,
                    known.owner,
                    known.generation,
                    known.heartbeat_ttl_ms,
                    draining=not change.gone,
                    gone=change.gone,
                )
            case control.PurgeTenant():
                return TenantEntry(number, change.tenant, self.view.registry.purges(change.tenant) + 1)

    def _worker(self, name: messages.WorkerName) -> WorkerEntry | None:
        return self.view.registry.workers.get(Worker(name.worker, name.dp_rank))

    async def describe(self, _: Principal, __: messages.Empty) -> messages.ClusterReply:
        shards = [
            messages.ShardStatus(
                shard=name,
                state="serving",
                http=shard.life.http_address,
                stream=shard.life.stream_address,
                incarnation=shard.life.incarnation,
                slots=len(self._all.slot_map.slots_of(name)),
                epoch=shard.view.epoch,
                number=shard.view.number,
                blocks=0 if shard.life.index is None else shard.life.index.statistics().blocks,
                segments=0,
                resident_bytes=0,
                disk_bytes=0,
                lease_left_s=55.0,
                snapshot_age_s=1.0,
                log_bytes=0,
                recovery_s=0.0,
            )
            for name, shard in self._all.shards.items()
        ]
        return messages.ClusterReply(
            cluster=self.cluster,
            coordinator=self.node,
            leading=True,
            epoch=self.view.epoch,
            number=self.view.number,
            splits=len(self._all.slot_map.splits),
            shards=shards,
            routers=[
                messages.RouterStatus(router=router.node, http=router.http_address, epoch=router.view.epoch, seen_s=0.1)
                for router in self._all.routers
            ],
        )

    async def events(self, _: Principal, request: messages.EventsRequest) -> messages.EventList:
        every = [
            Event(number=number, time=1e9 + number, node="s0", kind="state", text=f"event {number}")
            for number in range(1, 6)
        ]
        return messages.EventList(events=[one for one in every if one.number > request.after][: request.limit])

    async def command(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        self.commands.append(request.shard)
        return messages.Done()


class LocalCluster:
    """Make one with `local_cluster`."""

    def __init__(self, directory: Path, names: Sequence[str], splits: Mapping[int, int], nonce: bytes = NONCE) -> None:
        self.directory = directory
        self.slot_map = SlotMap.first(names, nonce, splits)
        self.shards: dict[str, ShardService] = {}
        self.routers: list[RouterService] = []
        self.coordinator = Coordinator(self, self.slot_map)
        self.credentials: list[Credential] = []
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[int]] = {}
        self._stream: StreamServer | None = None

    @property
    def url(self) -> str:
        """Of the first router, by HTTP."""
        return f"http://{self.routers[0].http_address}"

    def urls(self, scheme: str) -> str:
        """Of all routers."""
        if scheme == "http":
            return ",".join(f"http://{router.http_address}" for router in self.routers)
        return ",".join(f"sarp://{router.stream_address}" for router in self.routers)

    async def install(self, slot_map: SlotMap | None = None, only: Sequence[str] | None = None) -> None:
        """Give every node, or only these, what the coordinator knows."""
        if slot_map is not None:
            self.slot_map = self.coordinator.view.slot_map = slot_map
        view = self.coordinator.view
        for name, shard in self.shards.items():
            if only is None or name in only:
                await shard.life.install(self.slot_map.packed(), view.registry.entries(), view.number)
        for router in self.routers:
            if only is None or router.node in only:
                await router._install(self.slot_map.packed(), view.registry.entries(), view.number)

    async def begin(self, shards: Sequence[str], routers: int) -> None:
        self._stream = await StreamServer.start(self.coordinator, "127.0.0.1", 0)
        for name in shards:
            self.shards[name] = ShardService(self.settings(name), CONFIG)
            self._run(name, self.shards[name])
        for number in range(routers):
            router = RouterService(self.settings(f"router-{number}"))
            self.routers.append(router)
            self._run(router.node, router)
        await self.until_ready()

    async def until_ready(self) -> None:
        nodes: list[ShardService | RouterService] = [*self.shards.values(), *self.routers]
        lines = [*(shard.life.line for shard in self.shards.values()), *(router.line for router in self.routers)]

        def hurry() -> None:
            for task in self._tasks.values():
                assert not task.done(), task
            for line in lines:
                line.hurry()

        await until(lambda: all(node.ready() is None for node in nodes), hurry)
        for router in self.routers:
            await until(
                lambda router=router: (
                    all(link.peer.connected for link in router.links.all())  # type: ignore[misc]
                    and len(router.links.all()) == len(self.slot_map.shards)
                ),
                hurry,
            )

    def settings(self, name: str) -> NodeSettings:
        assert self._stream is not None
        return NodeSettings(
            node=name,
            directory=self.directory / name,
            secret=SECRET,
            coordinators=(self._stream.address,),
            authenticator=Authenticator(self.credentials, node_token(SECRET)),
        )

    def _run(self, name: str, service: ShardService | RouterService) -> None:
        stop = self._stops[name] = asyncio.Event()
        (self.directory / name).mkdir(exist_ok=True)
        self._tasks[name] = asyncio.get_running_loop().create_task(service.run(stop))

    async def stop(self, name: str) -> None:
        """End one node."""
        self._stops[name].set()
        await self._tasks.pop(name)

    async def restart(self, name: str) -> None:
        """End a shard, if it has not ended, and start it again, at another address."""
        if name in self._tasks:
            await self.stop(name)
        self.shards[name] = ShardService(self.settings(name), CONFIG)
        self._run(name, self.shards[name])
        await self.until_ready()

    async def close(self) -> None:
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._tasks.values())
        if self._stream is not None:
            await self._stream.close()


@asynccontextmanager
async def local_cluster(
    directory: Path,
    *,
    shards: Sequence[str] = ("s0",),
    routers: int = 1,
    splits: Mapping[int, int] | None = None,
    credentials: Sequence[Credential] = (),
) -> AsyncIterator[LocalCluster]:
    """A cluster that serves."""
    cluster = LocalCluster(directory, shards, splits or {})
    cluster.credentials = list(credentials)
    try:
        await cluster.begin(shards, routers)
        yield cluster
    finally:
        await cluster.close()
