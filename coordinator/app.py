"""A coordinator as a service: what it does for each operation, and its process (design §3 and §7).

While it leads it has a ControlLoop; while another does, or before it has read its records, it says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.control_loop import ControlLoop
from coordinator.instructions import RefusalReason, Refuse
from coordinator.routers import Routers
from coordinator.status import cluster_reply, facts, shard_metrics
from coordinator.supervisor import Supervisor
from sarp_cluster import limits
from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import Membership, Records
from sarp_cluster.errors import (
    EpochConflictError,
    ExistsError,
    IncompleteError,
    MembershipError,
    NotLeaderError,
    RecoveringError,
    SarpError,
    StorePoisonedError,
    TooLargeError,
    UnavailableError,
)
from sarp_cluster.observe.metrics import Metric, render
from sarp_cluster.observe.page import page
from sarp_cluster.observe.timeline import Timeline
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.storage.record_file import RecordFile
from sarp_cluster.wire import control, messages, view_replies
from sarp_cluster.wire.auth import Authenticator, Principal, cluster_id
from sarp_cluster.wire.node import EXIT_POISONED, NodeSettings, Servers
from sarp_cluster.wire.service import Handler

logger: Final = logging.getLogger(__name__)

RENEW_S: Final = limits.LEADER_LEASE_MS / 1000 / 4
LEAD_S: Final = limits.LEADER_LEASE_MS / 1000 * 0.7
"""For how long it leads on while the membership does not answer: shorter than its lease lasts there."""
STOP_SHARD_S: Final = 10.0
"""What a supervised shard has to end in order, where the coordinator takes its shards with it."""
REFUSALS: Final[dict[RefusalReason, tuple[type[SarpError], str]]] = {
    "identity_clash": (ExistsError, "shard: another directory has this name"),
    "superseded": (UnavailableError, "shard: another process of this shard was heard since"),
    "epoch_conflict": (EpochConflictError, "epoch: this shard's slot map is of another coordinator"),
    "too_many": (TooLargeError, f"shard: over the limit of {limits.SHARDS_MAX}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings of a coordinator beside those that every node has."""

    expected: int = 1
    """Shards that have to join before the first slot map is made."""
    splits: Mapping[int, int] = field(default_factory=dict)
    """Of the first slot map: internal block ID -> position."""
    supervised: Callable[[str], Mapping[str, Sequence[str]]] | None = None
    """Shards that it starts itself: from its own stream address to name -> command."""
    stop_shards: bool = False
    """The shards it started end with it."""


class CoordinatorService:
    """See sarp_cluster.wire.service.Service."""

    def __init__(
        self,
        settings: NodeSettings,
        own: CoordinatorSettings,
        *,
        membership: Callable[[], Awaitable[Membership]] | None = None,
        file_system: FileSystem = DISK,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._own = own
        self._open_membership = membership or self._embedded
        self._file_system = file_system
        self._wall_clock = wall_clock
        self.addresses: Servers | None = None
        """Where it listens, while it does."""
        self._cluster = cluster_id(settings.secret)
        self.term: ControlLoop | None = None
        self.timeline: Timeline | None = None
        self.supervisor: Supervisor | None = None
        self.routers = Routers()
        self.changes = 0
        self._handlers: dict[str, Handler] = {
            "shard_heartbeat": self.shard_heartbeat,
            "router_heartbeat": self.router_heartbeat,
            "fetch": self.fetch,
            "change": self.change,
            "cluster": self.cluster_status,
            "slots": self.slots,
            "events": self.events,
            "snapshot_shard": self.snapshot,
            "recover_shard": self.recover,
            "drain_shard": self.drain,
        }

    @property
    def node(self) -> str:
        """The coordinator's name."""
        return self._settings.node

    @property
    def cluster(self) -> str:
        """Id of its cluster."""
        return self._cluster

    @property
    def authenticator(self) -> Authenticator:
        """Who may ask."""
        return self._settings.authenticator

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By operation."""
        return self._handlers

    def ready(self) -> str | None:
        """None: it leads, and there is a slot map."""
        if self.term is None:
            return "another coordinator leads, or the records are not read yet"
        return None if self.term.settled() else "waiting for shards: there is no slot map that most of them have"

    def _leading(self) -> ControlLoop:
        if self.term is None:
            raise NotLeaderError(f"{self.node} does not lead")
        return self.term

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _heard(self, lease_ms: int) -> control.HeartbeatReply:
        term = self._leading()
        return control.HeartbeatReply(
            lease_ms=lease_ms, epoch=term.view.epoch, number=term.view.number, nodes=term.nodes, leading=True
        )

    @staticmethod
    def _not_leading() -> control.HeartbeatReply:
        return control.HeartbeatReply(lease_ms=0, epoch=0, number=0, nodes=[], leading=False)

    async def shard_heartbeat(self, _: Principal, request: control.ShardHeartbeat) -> control.HeartbeatReply:
        """A shard is there."""
        if self.term is None:
            return self._not_leading()
        answer = self.term.heartbeat(request)
        if isinstance(answer, Refuse):
            kind, why = REFUSALS[answer.reason]
            raise kind(why)
        return self._heard(answer.lease_ms)

    async def router_heartbeat(self, _: Principal, request: control.RouterHeartbeat) -> control.HeartbeatReply:
        """A router is there."""
        if self.term is None:
            return self._not_leading()
        if self.routers.heard(request, asyncio.get_running_loop().time()):
            self.term.note(request.router, "router_joined", request.http)
        return self._heard(0)

    async def fetch(self, _: Principal, request: control.FetchRequest) -> control.View:
        """What is newer than what a node has."""
        term = self._leading()
        return view_replies.newer(term.view, request, term.nodes)

    async def change(self, _: Principal, request: control.ChangeRequest) -> control.ChangeReply:
        """A change without a key."""
        term = self._leading()
        if not term.settled():
            raise RecoveringError("the coordinator has not heard most of the shards yet")
        self.changes += 1
        entry, missing = await term.changes.change(request.change)
        if missing:
            raise IncompleteError(
                f"change {entry.number} is made, but {', '.join(missing)} cannot be reached yet; ask again",
                missing=missing,
            )
        return control.ChangeReply(entry=entry)

    # --- operators ----------------------------------------------------------------------------------------------------

    async def cluster_status(self, _: Principal, __: messages.Empty) -> messages.ClusterReply:
        """The cluster as this coordinator sees it."""
        now = asyncio.get_running_loop().time()
        return cluster_reply(self._leading(), coordinator=self.node, routers=self.routers.status(now), now=now)

    async def slots(self, _: Principal, __: messages.Empty) -> messages.SlotsReply:
        """The slot map."""
        return view_replies.slots(self._leading().view)

    async def events(self, _: Principal, request: messages.EventsRequest) -> messages.EventList:
        """What happened."""
        if self.timeline is None:
            raise RecoveringError("the timeline is being read")
        return messages.EventList(events=self.timeline.after(request.after, request.limit))

    async def snapshot(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        """Have a shard take a snapshot, as soon as no other does."""
        self._leading().snapshot(request.shard)
        return messages.Done()

    async def recover(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        """Start a shard again that does not serve."""
        await self._leading().recover(request.shard)
        return messages.Done()

    async def drain(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        """Have a shard refuse changes, finish, take a snapshot and end. The timeline tells how far it is."""
        self._leading().drain(request.shard)
        return messages.Done()

    # --- for people ---------------------------------------------------------------------------------------------------

    def metrics(self) -> str:
        """In Prometheus's text format."""
        term, timeline = self.term, self.timeline
        found = [
            Metric("sarp_coordinator_leading", "gauge", "1 when it leads.", int(term is not None)),
            Metric("sarp_coordinator_ready", "gauge", "1 when there is a published map.", int(self.ready() is None)),
            Metric("sarp_coordinator_changes_total", "counter", "Changes without a key asked for.", self.changes),
            Metric("sarp_coordinator_routers", "gauge", "Routers that were heard.", len(self.routers)),
        ]
        if timeline is not None:
            found += [
                Metric("sarp_coordinator_events_total", "counter", "Events of the timeline.", timeline.last),
                Metric("sarp_coordinator_timeline_failures_total", "counter", "Writes that failed.", timeline.failed),
            ]
        if term is not None:
            found += [
                Metric("sarp_coordinator_slot_map_epoch", "gauge", "Epoch of the published map.", term.view.epoch),
                Metric("sarp_coordinator_change_number", "gauge", "Last change without a key.", term.view.number),
                *shard_metrics(term, asyncio.get_running_loop().time()),
            ]
        return render(found)

    def page(self) -> str:
        """For people."""
        found = [("leads", "yes" if self.term is not None else "no"), ("ready", self.ready() or "yes")]
        if self.term is not None:
            found += facts(self.term, asyncio.get_running_loop().time())
        for router in self.routers.status(asyncio.get_running_loop().time()):
            found.append((f"router {router.router}", f"slot map {router.epoch} · heard {router.seen_s:.0f} s ago"))
        if self.timeline is not None:
            for event in reversed(self.timeline.after(max(0, self.timeline.last - 20), 20)):
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time))
                found.append((f"{when} UTC", f"{event.kind} {event.node}: {event.text}"))
        links = ["/healthz", "/readyz", "/metrics", "/v1/cluster", "/v1/slots", "/v1/events"]
        return page(f"SARP coordinator {self.node}", found, links)

    # --- the process --------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`. Returns the exit status. Supervised shards go on, unless they are to end with it."""
        directory = self._settings.directory
        membership = await self._open_membership()
        status = 0
        try:
            self.timeline = await Timeline.open(directory / "timeline.ndjson", wall_clock=self._wall_clock)
            servers = self.addresses = await Servers.start(self, self._settings)
            logger.info(
                "coordinator %s: HTTP on %s, stream on %s", self.node, servers.http_address, servers.stream_address
            )
            if self._own.supervised is not None:
                commands = self._own.supervised(servers.stream_address)
                self.supervisor = Supervisor(directory / "shards", commands, self._exited)
                await self.supervisor.adopt()
            await until(stop, self._lead_for_ever(membership), self.timeline.run())
        except StorePoisonedError as error:
            logger.error("the disk failed: %s", error)
            status = EXIT_POISONED
        finally:
            self.term = None
            await self._end_shards()
            if self.addresses is not None:
                await self.addresses.close()
            if self.timeline is not None:
                await self.timeline.close()
            await membership.close()
        return status

    async def _embedded(self) -> Membership:
        """Records in a file of our own. Another coordinator that has it: StorageError."""
        records = await RecordFile.open(self._settings.directory / "records", self._file_system)
        try:
            return await EmbeddedMembership.open(records)
        except BaseException:
            await records.close()
            raise

    def _exited(self, name: str, pid: int) -> None:
        if self.term is not None:
            self.term.exited(name, pid)

    async def _end_shards(self) -> None:
        if self.supervisor is None:
            return
        if self._own.stop_shards:
            names = sorted(self.supervisor.names)
            ended = await asyncio.gather(*(self.supervisor.stop(name, STOP_SHARD_S) for name in names))
            for name, well in zip(names, ended, strict=True):
                if not well:
                    logger.warning("shard %s does not end: killed", name)
                    self.supervisor.kill(name)
        await self.supervisor.close()

    async def _lead_for_ever(self, membership: Membership) -> None:
        """Lead whenever no other does."""
        while True:
            while not await self._renewed(membership):
                await asyncio.sleep(RENEW_S)
            self.term = self._term(membership, await membership.load())
            self.term.note(
                self.node, "coordinator_leads", f"epoch {self.term.view.epoch}, change {self.term.view.number}"
            )
            ended = asyncio.Event()
            try:
                await until(ended, self.term.run(), self._keep_leading(membership, ended))
            finally:
                self.term = None
            logger.warning("this coordinator leads no more")

    async def _keep_leading(self, membership: Membership, ended: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            asked_at = loop.time()
            renewed = await self._renewed(membership)
            if renewed:
                since = asked_at
            elif renewed is False or loop.time() - since >= LEAD_S:
                break
            await asyncio.sleep(RENEW_S)
        ended.set()
        await loop.create_future()

    async def _renewed(self, membership: Membership) -> bool | None:
        """Do we lead? None: nobody says."""
        try:
            return await membership.lead(self.node)
        except MembershipError as error:
            logger.warning("whether we lead is not known: %s", error)
            return None

    def _term(self, membership: Membership, records: Records) -> ControlLoop:
        if self.timeline is None:
            raise RecoveringError("the timeline is being read")

        def hello() -> control.Hello:
            return control.Hello(
                version=control.PROTOCOL_VERSION,
                cluster=self._cluster,
                credential=self._settings.node_token,
                node=self.node,
            )

        return ControlLoop(
            records,
            expected=self._own.expected,
            splits=self._own.splits,
            cluster=self._cluster,
            hello=hello,
            tls=self._settings.peer_tls,
            membership=membership,
            timeline=self.timeline,
            supervisor=self.supervisor,
        )


async def until(stop: asyncio.Event, *work: Coroutine[Any, Any, None]) -> None:
    """Do all of these until `stop` is set or one of them raises, which is raised; the others are cancelled."""
    tasks = {asyncio.ensure_future(one) for one in (*work, stop.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            _result(task)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _result(task: asyncio.Future[Any]) -> None:
    """Raise what a task raised: of a group the first, which ended the others."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
