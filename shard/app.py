"""A shard as a service: what it does for each operation, and its process (design §3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from sarp_cluster.cluster.registry import Entry
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import BadRequestError, RecoveringError
from sarp_cluster.observe.metrics import Metric, render
from sarp_cluster.observe.page import page
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.types import Worker
from sarp_cluster.wire import control, messages, view_replies
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.keyless import Keyless
from sarp_cluster.wire.node import EXIT_POISONED, NodeSettings, Servers, until
from sarp_cluster.wire.service import Handler
from shard.blocks import Blocks
from shard.lifecycle import Lifecycle

logger: Final = logging.getLogger(__name__)

WATCH_S: Final = 0.2
"""How often it is looked whether the store was poisoned."""


class ShardService:
    """See sarp_cluster.wire.service.Service."""

    def __init__(self, settings: NodeSettings, config: IndexConfig, *, file_system: FileSystem = DISK) -> None:
        self._settings = settings
        self.node = settings.node
        self.authenticator = settings.authenticator
        self.view = ClusterView()
        self.life = Lifecycle(settings, config, self.view, file_system=file_system)
        self.keyless = Keyless(self.view, settings.secret, self.life.line.peer, self._entered, silent=self._silent)
        self.blocks = Blocks(settings.node, self.view, self.keyless, self.life.learn)
        self.handlers: Mapping[str, Handler] = {
            **self.blocks.handlers,
            **self.keyless.handlers,
            "heartbeat": self.heartbeat,
            "heard": self.heard,
            "slots": self.slots,
            "fetch": self.fetch,
            "install": self.install,
            "probe": self.probe,
            "snapshot_shard": self.snapshot,
            "drain_shard": self.drain,
        }

    @property
    def cluster(self) -> str:
        """Id of its cluster."""
        return self.view.cluster

    def ready(self) -> str | None:
        """None: it serves."""
        return self.life.why or None

    # --- what is asked ------------------------------------------------------------------------------------------------

    async def _entered(self, entry: Entry) -> None:
        """The coordinator has changed something for us; it reaches us as every other shard."""

    def _silent(self, worker: Worker) -> bool:
        return self.life.liveness is not None and self.life.liveness.silent(worker)

    async def heartbeat(self, principal: Principal, request: messages.HeartbeatRequest) -> messages.Done:
        """Workers are there, says one who talks to this shard alone."""
        workers = [Worker(one.worker, one.dp_rank) for one in request.workers]
        for worker in workers:
            self.keyless.own_worker(principal, worker)
        self.life.note_heard(workers)
        return messages.Done()

    async def heard(self, _: Principal, request: control.HeardRequest) -> messages.Done:
        """Workers are there, says a router."""
        self.life.note_heard([Worker(one.worker, one.dp_rank) for one in request.workers])
        return messages.Done()

    async def slots(self, _: Principal, __: messages.Empty) -> messages.SlotsReply:
        """The slot map."""
        return view_replies.slots(self.view)

    async def fetch(self, _: Principal, request: control.FetchRequest) -> control.View:
        """What this shard knows that is newer."""
        return view_replies.newer(self.view, request)

    async def install(self, _: Principal, request: control.InstallRequest) -> control.InstallReply:
        """Take over what the coordinator has changed."""
        if self.life.index is None:
            raise RecoveringError("this shard is opening its store")
        if request.above <= self.view.number:
            await self.life.install(request.slot_map, request.entries, request.number)
        return control.InstallReply(epoch=self.view.epoch, nonce=self.view.nonce, number=self.view.number)

    async def probe(self, _: Principal, __: control.ProbeRequest) -> control.ProbeReply:
        """It is well."""
        return control.ProbeReply(
            node=self.node,
            incarnation=self.life.incarnation,
            state=self.life.state,
            epoch=self.view.epoch,
            number=self.view.number,
        )

    def _for_us(self, command: control.ShardCommand) -> None:
        if command.shard != self.node:
            raise BadRequestError(f"shard: this is {self.node}, not {command.shard}", field="shard")

    async def snapshot(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        """Take a snapshot."""
        self._for_us(request)
        if self.life.index is None:
            raise RecoveringError("this shard is opening its store")
        await self.life.index.snapshot()
        return messages.Done()

    async def drain(self, _: Principal, request: control.ShardCommand) -> messages.Done:
        """Take no more changes, finish, snapshot, end."""
        self._for_us(request)
        await self.life.drain()
        return messages.Done()

    # --- for people ---------------------------------------------------------------------------------------------------

    def metrics(self) -> str:
        """In Prometheus's text format."""
        blocks, view, index = self.blocks, self.view, self.life.index
        found = [
            Metric("sarp_shard_ready", "gauge", "1 when it serves.", int(self.ready() is None)),
            Metric("sarp_shard_slot_map_epoch", "gauge", "Epoch of its slot map.", view.epoch),
            Metric("sarp_shard_change_number", "gauge", "Last change without a key that it has.", view.number),
            Metric("sarp_shard_recovery_seconds", "gauge", "What its recovery took.", self.life.recovery_s),
            Metric("sarp_shard_matches_total", "counter", "Matches.", blocks.matches),
            Metric("sarp_shard_matches_cut_total", "counter", "Matches ended by their deadline.", blocks.matches_cut),
            Metric("sarp_shard_inserts_total", "counter", "Inserts.", blocks.inserts),
            Metric("sarp_shard_removes_total", "counter", "Removals.", blocks.removes),
        ]
        if index is not None:
            statistics = index.statistics()
            found += [
                Metric("sarp_shard_blocks", "gauge", "Blocks in the index.", statistics.blocks),
                Metric("sarp_shard_segments", "gauge", "Segments in the index.", statistics.segments),
                Metric("sarp_shard_resident_bytes", "gauge", "Memory of its tables.", statistics.resident_bytes),
                Metric("sarp_shard_disk_bytes", "gauge", "Its log files.", statistics.disk_bytes),
                Metric("sarp_shard_live_disk_bytes", "gauge", "Of these, live.", statistics.live_disk_bytes),
                Metric("sarp_shard_backfills_pending", "gauge", "Posting lists due.", statistics.backfills_pending),
                Metric("sarp_shard_unloaded_chunks", "gauge", "Chunks not loaded yet.", statistics.unloaded_chunks),
                Metric("sarp_shard_damaged_reads_total", "counter", "Damaged reads.", statistics.damaged_segments),
            ]
        return render(found)

    def page(self) -> str:
        """For people."""
        facts = [
            ("state", self.life.state),
            ("slot map", str(self.view.epoch)),
            ("matches", f"{self.blocks.matches:,}"),
        ]
        if self.life.why:
            facts.append(("waiting", self.life.why))
        if self.life.index is not None:
            statistics = self.life.index.statistics()
            facts += [
                ("blocks", f"{statistics.blocks:,}"),
                ("segments", f"{statistics.segments:,}"),
                ("memory", f"{statistics.resident_bytes / 1e6:,.1f} MB"),
                ("disk", f"{statistics.disk_bytes / 1e6:,.1f} MB"),
                ("recovered in", f"{self.life.recovery_s:.3f} s"),
            ]
        return page(f"SARP shard {self.node}", facts, ["/healthz", "/readyz", "/metrics", "/v1/slots"])

    # --- the process --------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`, or drained. Returns the exit status."""
        servers = await Servers.start(self, self._settings)
        life = self.life
        life.stream_address, life.http_address = servers.stream_address, servers.http_address
        logger.info("shard %s: HTTP on %s, stream on %s", self.node, servers.http_address, servers.stream_address)
        status = 0
        try:
            await life.prepare(self.blocks)
            await until(stop, life.line.run(), self._serve(), self._drained(stop))
        except OSError as error:
            logger.error("the disk failed: %s", error)
            status = EXIT_POISONED
        finally:
            if status == 0:
                await life.close()
            await servers.close()
        return status

    async def _serve(self) -> None:
        """Open the index, catch up, and go on until it cannot."""
        await self.life.open()
        await until(asyncio.Event(), self._failed(), self.life.catch_up())

    async def _drained(self, stop: asyncio.Event) -> None:
        """Drained, it ends as if it had been told to."""
        await self.life.ended.wait()
        stop.set()

    async def _failed(self) -> None:
        """Until the index cannot go on: then the process has to end, and recover from the disk."""
        index = self.life.index
        if index is None:
            return

        async def poisoned() -> None:
            while index.store.failure is None:
                await asyncio.sleep(WATCH_S)
            raise index.store.failure

        await until(asyncio.Event(), index.failed(), poisoned())
