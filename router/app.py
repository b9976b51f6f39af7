"""A router as a service: what it does for each operation, and its process (design §3).

Stateless but for the last view of the cluster, which it keeps on disk to start without a coordinator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from router.blocks import Blocks
from router.forwarding import Links
from sarp_cluster import limits
from sarp_cluster.cluster.registry import Entry
from sarp_cluster.cluster.slot_map import PackedSlotMap, SlotMap
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.cluster.view_file import keep_view, restore_view
from sarp_cluster.errors import SarpError
from sarp_cluster.observe.metrics import Metric, render
from sarp_cluster.observe.page import page
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.storage.record_file import RecordFile
from sarp_cluster.types import Worker
from sarp_cluster.wire import control, messages, view_replies
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.coordination import CoordinatorLine, note_addresses, wanted
from sarp_cluster.wire.keyless import Keyless
from sarp_cluster.wire.node import NodeSettings, Servers, until
from sarp_cluster.wire.operations import OPERATIONS
from sarp_cluster.wire.service import Handler

logger: Final = logging.getLogger(__name__)

REFRESH_S: Final = 0.02
"""What one node has to say what is newer, while a request waits."""
TELL_S: Final = 1.0
"""How often shards are told which workers were heard."""
CONTROL: Final = ("cluster", "events", "snapshot_shard", "recover_shard", "drain_shard")
"""Operations that are the coordinator's, and passed on to it."""


class RouterService:
    """See sarp_cluster.wire.service.Service."""

    def __init__(self, settings: NodeSettings, *, file_system: FileSystem = DISK) -> None:
        self._settings = settings
        self.node = settings.node
        self.authenticator = settings.authenticator
        self._file_system = file_system
        self.view = ClusterView()
        self.links = Links(self.view, settings.hello(), settings.peer_tls)
        self.line = CoordinatorLine(settings.coordinators, settings.hello, self, tls=settings.peer_tls)
        self.keyless = Keyless(self.view, settings.secret, self.line.peer, self._entered, refresh=self._refresh)
        self.blocks = Blocks(self.view, settings.secret, self.keyless, self.links, self._refresh)
        self._heard: set[Worker] = set()
        self._view_file: RecordFile | None = None
        self._saving = asyncio.Lock()  # held across our own disk only
        self._refreshing: asyncio.Task[None] | None = None
        self._draining = False
        self.http_address = self.stream_address = ""
        self.handlers: Mapping[str, Handler] = {
            **self.blocks.handlers,
            **self.keyless.handlers,
            **{name: self._passed_on(name) for name in CONTROL},
            "heartbeat": self.heartbeat,
            "slots": self.slots,
            "fetch": self.fetch,
            "install": self.install,
        }

    @property
    def cluster(self) -> str:
        """Id of its cluster."""
        return self.view.cluster

    def ready(self) -> str | None:
        """None: it serves."""
        if self._draining:
            return "draining"
        return "waiting for a slot map: not all shards have joined" if self.view.slot_map is None else None

    # --- what is asked ------------------------------------------------------------------------------------------------

    async def heartbeat(self, principal: Principal, request: messages.HeartbeatRequest) -> messages.Done:
        """Workers are there; all shards are told within a second."""
        workers = [Worker(one.worker, one.dp_rank) for one in request.workers]
        for worker in workers:
            await self.keyless.own_worker_informed(principal, worker)
        self._heard.update(workers)
        return messages.Done()

    async def slots(self, _: Principal, __: messages.Empty) -> messages.SlotsReply:
        """The slot map, for callers that ask shards themselves."""
        return view_replies.slots(self.view)

    async def fetch(self, _: Principal, request: control.FetchRequest) -> control.View:
        """What this router knows that is newer."""
        return view_replies.newer(self.view, request)

    async def install(self, _: Principal, request: control.InstallRequest) -> control.InstallReply:
        """Take over what the coordinator has changed."""
        if request.above <= self.view.number:
            await self._install(request.slot_map, request.entries, request.number)
        self._note_addresses(request.nodes)
        return control.InstallReply(epoch=self.view.epoch, nonce=self.view.nonce, number=self.view.number)

    def _passed_on(self, name: str) -> Handler:
        operation = OPERATIONS[name]

        async def pass_on(_: Principal, request: Any) -> messages.Reply:  # noqa: ANN401  # whatever the operation's is
            timeout_s = limits.CHANGE_TIMEOUT_MS / 1000
            return await self.line.peer.call(name, request, operation.reply, timeout_s)

        return pass_on

    # --- the line to the coordinator ----------------------------------------------------------------------------------

    def heard(self, reply: control.HeartbeatReply, _: float) -> None:
        """See wire.coordination.Reporting."""
        self._note_addresses(reply.nodes)

    def report(self) -> tuple[str, Any]:
        """See wire.coordination.Reporting."""
        return "router_heartbeat", control.RouterHeartbeat(
            router=self.node, http=self.http_address, epoch=self.view.epoch, number=self.view.number
        )

    async def take(self, view: control.View) -> None:
        """See wire.coordination.Reporting."""
        self._note_addresses(view.nodes)
        await self._install(view.slot_map, view.entries, view.number, cluster=view.cluster)

    def _note_addresses(self, nodes: Sequence[control.NodeAddress]) -> None:
        if note_addresses(self.view, nodes):
            self.links.changed()

    async def _install(
        self, packed: PackedSlotMap | None, entries: Sequence[Entry], number: int, *, cluster: str = ""
    ) -> None:
        view = self.view
        slot_map = view.newer_map(None if packed is None else SlotMap.unpacked(packed))
        before = view.number
        view.registry.apply(entries, number)
        view.cluster = view.cluster or cluster
        if slot_map is not None:
            view.slot_map = slot_map
            self.links.changed()
        if slot_map is not None or view.number > before:
            await self._save()

    async def _save(self) -> None:
        """Keep the view, to start with. What is not kept a coordinator or a shard tells again."""
        if self._view_file is None:
            return
        async with self._saving:
            await keep_view(self._view_file, self.view)

    async def _entered(self, entry: Entry) -> None:
        """The coordinator has changed something for us, and we keep it before the caller is told: the next process here
        has to know it, with or without a coordinator.

        Others may have changed more meanwhile. Then the number stays, and what lies between is fetched at once.
        """
        number = self.view.registry.number
        self.view.registry.apply([entry])
        if entry.number > number + 1:
            self.view.registry.number = number
            self.line.hurry()
        else:
            await self._save()

    async def _refresh(self) -> None:
        """Fetch what is newer from whoever has it; all that wait share one try."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._fetch_newer())
        await asyncio.wait([self._refreshing])

    async def _fetch_newer(self) -> None:
        peers = [link.peer for link in self.links.all() if not link.slow] + [self.line.peer]
        for peer in peers:
            before = self.view.epoch, self.view.number
            try:
                await self.take(await peer.call("fetch", wanted(self.view), control.View, REFRESH_S))
            except (SarpError, TimeoutError) as error:
                logger.debug("nothing newer: %s", error)
                continue
            if (self.view.epoch, self.view.number) != before:
                return

    # --- for people ---------------------------------------------------------------------------------------------------

    def metrics(self) -> str:
        """In Prometheus's text format."""
        view = self.view
        links = sorted(self.links.all(), key=lambda link: link.shard)
        return render(
            [
                Metric("sarp_router_ready", "gauge", "1 when it serves.", int(self.ready() is None)),
                Metric("sarp_router_slot_map_epoch", "gauge", "Epoch of its slot map.", view.epoch),
                Metric("sarp_router_change_number", "gauge", "Last change without a key that it has.", view.number),
                Metric("sarp_router_matches_total", "counter", "Matches.", self.blocks.matches),
                Metric("sarp_router_changes_total", "counter", "Inserts and removals.", self.blocks.changes),
                *(_reasons(self.links.degraded)),
                *(_links("connected", "gauge", "1 when it is.", {one.shard: one.peer.connected for one in links})),
                *(_links("requests_total", "counter", "Sent to it.", {one.shard: one.sent for one in links})),
                *(_links("unanswered_total", "counter", "Not in time.", {one.shard: one.unanswered for one in links})),
            ]
        )

    def page(self) -> str:
        """For people."""
        facts = [
            ("ready", self.ready() or "yes"),
            ("slot map", str(self.view.epoch)),
            ("matches", f"{self.blocks.matches:,}"),
            ("changes", f"{self.blocks.changes:,}"),
        ]
        facts += [
            (f"shard {link.shard}", "slow" if link.slow else "connected" if link.peer.connected else link.peer.failure)
            for link in sorted(self.links.all(), key=lambda link: link.shard)
        ]
        return page(f"SARP router {self.node}", facts, ["/healthz", "/readyz", "/metrics", "/v1/slots", "/v1/cluster"])

    # --- the process --------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`. Returns the exit status."""
        self._view_file = await RecordFile.open(self._settings.directory / "view", self._file_system)
        await restore_view(self._view_file, self.view)
        self.links.changed()
        servers = await Servers.start(self, self._settings)
        self.http_address, self.stream_address = servers.http_address, servers.stream_address
        logger.info("router %s: HTTP on %s, stream on %s", self.node, servers.http_address, servers.stream_address)
        try:
            await until(stop, self.line.run(), self._tell())
        finally:
            self._draining = True
            await servers.close()
            await self.links.close()
            await self._view_file.close()
        return 0

    async def _tell(self) -> None:
        """Tell all shards which workers were heard, and that this router is there."""
        while True:
            await asyncio.sleep(TELL_S)
            heard, self._heard = self._heard, set()
            names = [messages.WorkerName(worker=one.instance_id, dp_rank=one.dp_rank) for one in heard]
            for begin in range(0, max(1, len(names)), limits.WORKERS_LISTED_MAX):
                part = control.HeardRequest(workers=names[begin : begin + limits.WORKERS_LISTED_MAX])
                await self.links.tell_all("heard", part, TELL_S)


def _reasons(counts: Mapping[messages.Reason, int]) -> list[Metric]:
    name, what = "sarp_router_degraded_total", "Stretches whose answer did not come."
    return [Metric(name, "counter", what, count, (("reason", reason),)) for reason, count in sorted(counts.items())]


def _links(name: str, kind: Literal["counter", "gauge"], what: str, values: Mapping[str, int]) -> list[Metric]:
    return [
        Metric(f"sarp_router_shard_{name}", kind, what, int(value), (("shard", shard),))
        for shard, value in values.items()
    ]
