"""A coordinator as a service: what it does for each operation, and its process (design §3 and §7).

While it leads it has a ControlLoop; while another does, or before it has read its records, it says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.control_loop import ControlLoop
from coordinator.instructions import RefusalReason, Refuse
from coordinator.leadership import Leadership
from coordinator.routers import Routers
from coordinator.status import cluster_reply, facts, shard_metrics
from coordinator.supervisor import Supervisor
from sarp_cluster import limits
from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import Membership, Records
from sarp_cluster.cluster.redis_address import RedisAddress, connect
from sarp_cluster.cluster.redis_membership import RedisMembership
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
from sarp_cluster.wire.auth import Principal, cluster_id
from sarp_cluster.wire.node import EXIT_POISONED, NodeSettings, Servers, until
from sarp_cluster.wire.service import Handler

logger: Final = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often a coordinator that does not lead looks whether the shards it supervises run."""
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
    redis: RedisAddress | None = None
    """Where the records are; None: in the directory."""
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
        self.node = settings.node
        self.authenticator = settings.authenticator
        self._own = own
        self._open_membership = membership or (self._embedded if own.redis is None else self._in_redis)
        self._file_system = file_system
        self._wall_clock = wall_clock
        self.addresses: Servers | None = None
        """Where it listens, while it does."""
        self.cluster = cluster_id(settings.secret)
        self.term: ControlLoop | None = None
        self._leadership = Leadership(settings.node, self._lead, self._note)
        self._membership: Membership | None = None
        self._lock: RecordFile | None = None
        self.timeline: Timeline | None = None
        self.supervisor: Supervisor | None = None
        self.routers = Routers()
        self.changes = 0
        self.handlers: Mapping[str, Handler] = {
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

    def ready(self) -> str | None:
        """None: it leads, and there is a slot map."""
        if self.term is None or not self.leads:
            return "another coordinator leads, or the records are not read yet"
        return None if self.term.settled() else "waiting for shards: there is no slot map that most of them have"

    @property
    def leads(self) -> bool:
        """Does it lead, now?"""
        return self.term is not None and self._leadership.holds

    def _leading(self) -> ControlLoop:
        if self.term is None or not self.leads:
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
        if self.term is None or not self.leads:
            return self._not_leading()
        answer = self.term.heartbeat(request)
        if isinstance(answer, Refuse):
            kind, why = REFUSALS[answer.reason]
            raise kind(why)
        return self._heard(answer.lease_ms)

    async def router_heartbeat(self, _: Principal, request: control.RouterHeartbeat) -> control.HeartbeatReply:
        """A router is there."""
        if self.term is None or not self.leads:
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
            Metric("sarp_coordinator_leading", "gauge", "1 when it leads.", int(self.leads)),
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
        found = [("leads", "yes" if self.leads else "no"), ("ready", self.ready() or "yes")]
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
        membership = self._membership = await self._open_membership()
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
            await until(stop, self._leadership.run(membership), self._keep_shards(), self.timeline.run())
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
            if self._lock is not None:
                await self._lock.close()
        return status

    async def _embedded(self) -> Membership:
        """Records in a file of our own. Another coordinator that has it: StorageError."""
        records = await RecordFile.open(self._settings.directory / "records", self._file_system)
        try:
            return await EmbeddedMembership.open(records)
        except BaseException:
            await records.close()
            raise

    async def _in_redis(self) -> Membership:
        """Records in Redis. The directory, with the shards that are started from here, is this coordinator's alone."""
        if self._own.redis is None:
            raise MembershipError("there is no Redis")
        self._lock = await RecordFile.open(self._settings.directory / "records", self._file_system)
        logger.info("the records are in %s", self._own.redis)
        return RedisMembership(connect(self._own.redis), secret=self._settings.secret, cluster=self.cluster)

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

    async def _keep_shards(self) -> None:
        """While another leads: start the shards of this machine that have no process. One that was drained, by whoever
        leads, is not started before an operator says so."""
        while self.supervisor is not None:
            await asyncio.sleep(LOOK_S)
            if self.term is None:
                for name in sorted(self.supervisor.idle()):
                    if not await self.supervisor.hold_drained(name):
                        self.supervisor.start(name)
        await asyncio.get_running_loop().create_future()

    def _note(self, kind: str, text: str) -> None:
        if self.timeline is not None:
            self.timeline.note(self.node, kind, text)

    async def _lead(self, records: Records) -> None:
        """One term."""
        term = self.term = self._term(records)
        try:
            epoch = 0 if records.slot_map is None else records.slot_map.epoch
            term.note(self.node, "coordinator_leads", f"epoch {epoch}, change {records.number}")
            await term.run()
        finally:
            self.term = None

    def _term(self, records: Records) -> ControlLoop:
        if self.timeline is None or self._membership is None:
            raise RecoveringError("the timeline is being read")

        return ControlLoop(
            records,
            expected=self._own.expected,
            splits=self._own.splits,
            cluster=self.cluster,
            hello=lambda: self._settings.hello(self.cluster),
            tls=self._settings.peer_tls,
            membership=self._membership,
            timeline=self.timeline,
            supervisor=self.supervisor,
        )
