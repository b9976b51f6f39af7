"""A shard's life: open what the directory has, catch up with the cluster, serve, drain, end (design §7).

recovering → serving → draining. Its servers listen from the first moment, so that who asks is told what it waits for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.slot_map import PackedSlotMap, SlotMap
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.cluster.view_file import keep_view, restore_view
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import SarpError, StorageError
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.storage.record_file import RecordFile
from sarp_cluster.types import Worker
from sarp_cluster.wire import control
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.coordination import CoordinatorLine, note_addresses, wanted
from sarp_cluster.wire.node import NodeSettings
from sarp_cluster.wire.stream_client import StreamClient
from shard.blocks import Blocks
from shard.index import Index
from shard.liveness import Liveness

logger: Final = logging.getLogger(__name__)

ASK_PEERS_AFTER_S: Final = 2.0
"""A shard that no coordinator answers asks the other shards what it has missed."""


class Lifecycle:
    """Owns the index, the view, and the line to the coordinator."""

    def __init__(
        self, settings: NodeSettings, config: IndexConfig, view: ClusterView, *, file_system: FileSystem = DISK
    ) -> None:
        self._settings = settings
        self._config = config
        self._file_system = file_system
        self.view = view
        self.state: control.NodeState = "recovering"
        self.why = "recovering: opening the store"
        """Why it does not serve, for people."""
        self.incarnation = secrets.token_hex(8)
        self.store_identity = ""
        self.recovery_s = 0.0
        self.stream_address = ""
        self.http_address = ""
        self.blocks: Blocks | None = None
        self.liveness: Liveness | None = None
        self.index: Index | None = None
        self.line = CoordinatorLine(settings.coordinators, self._hello, self, tls=settings.peer_tls)
        self._view_file: RecordFile | None = None
        self._taking = asyncio.Lock()  # one change of the view at a time; held across our own disk only
        self._news = asyncio.Event()
        """Set, and made anew, when the view has changed."""
        self._caught_up = asyncio.Event()
        self._opened = False
        self._snapshot_at = asyncio.get_running_loop().time()
        self._snapshots_taken = 0
        self.ended = asyncio.Event()
        """Drained: the process may end."""

    def _hello(self) -> control.Hello:
        return self._settings.hello(self.view.cluster)

    # --- opening ------------------------------------------------------------------------------------------------------

    async def prepare(self, blocks: Blocks) -> None:
        """Take the directory, and know who we are and what the cluster was like: enough to say that we are there."""
        directory = self._settings.directory
        self.blocks = blocks
        self._view_file = await RecordFile.open(directory / "view", self._file_system)
        await restore_view(self._view_file, self.view)
        self.store_identity = await self._identity(directory / "identity")

    async def open(self) -> None:
        """Open the index. Returns when it is recovered; the shard serves once it has caught up."""
        directory = self._settings.directory
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self.index = await Index.open(
            directory / "index",
            self._config,
            secret=self._settings.secret,
            progress=self._replaying,
            file_system=self._file_system,
        )
        self.recovery_s = loop.time() - begun
        self.liveness = Liveness(self.index.state.workers)
        self.index.state.live_mask = self.liveness.mask
        # What is in the view may not be in the index: a crash came in between, or it was heard of while this opened.
        async with self._taking:
            await self._enter_durably(self.view.registry.entries())
        self._opened = True
        self.why = "recovering: waiting for the coordinator, to learn what has changed meanwhile"
        logger.info("opened in %.3f s", self.recovery_s)
        self.line.hurry()

    async def _identity(self, path: Path) -> str:
        """What tells this directory from every other: made with it."""
        file = await RecordFile.open(path, self._file_system)
        try:
            known = await file.read()
            if known is None:
                known = secrets.token_hex(16).encode()
                await file.write(known)
            return known.decode()
        finally:
            await file.close()

    def _replaying(self, done: int, total: int) -> None:
        self.why = f"recovering: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB of the log replayed"

    async def catch_up(self) -> None:
        """Serve once nothing can be missing: a coordinator has answered, or most shards together have.

        What has no key, such as a worker's new generation, may have changed while this shard was away.
        """
        while not self._caught_up.is_set():
            try:
                async with asyncio.timeout(ASK_PEERS_AFTER_S):
                    await self._caught_up.wait()
            except TimeoutError:
                if await self._ask_peers():
                    self._caught_up.set()
        if self.blocks is not None and self.state == "recovering":
            self.blocks.index = self.index
            self.state = "serving"
            self.why = ""
            self.line.hurry()
            logger.info("serving, slot map %d, change %d", self.view.epoch, self.view.number)

    async def _ask_peers(self) -> bool:
        """Fetch from the other shards; did more than half of all, this one counted, answer?"""
        slot_map = self.view.slot_map
        if slot_map is None or not self._opened:
            return False
        answered = 1
        for shard in slot_map.shards:
            address = self.view.addresses.get(shard)
            place = None if address is None else address.stream_address
            if shard == self._settings.node or place is None:
                continue
            try:
                client = await StreamClient.connect(*place, self._hello(), tls=self._settings.peer_tls)
                try:
                    async with asyncio.timeout(ASK_PEERS_AFTER_S):
                        raw = await client.request("fetch", wanted(self.view))
                    await self.take(decode(raw, control.View))
                    answered += 1
                finally:
                    client.close()
            except (SarpError, TimeoutError) as error:
                logger.debug("%s does not say what has changed: %s", shard, error)
        return answered * 2 > len(slot_map.shards)

    # --- the line to the coordinator ----------------------------------------------------------------------------------

    def report(self) -> tuple[str, Any]:
        """See wire.coordination.Reporting."""
        index, now = self.index, asyncio.get_running_loop().time()
        statistics = None if index is None else index.statistics()
        snapshots = None if index is None else index.snapshots
        if snapshots is not None and snapshots.taken != self._snapshots_taken:
            self._snapshots_taken = snapshots.taken
            self._snapshot_at = now
        return "shard_heartbeat", control.ShardHeartbeat(
            shard=self._settings.node,
            store=self.store_identity or "opening",
            incarnation=self.incarnation,
            pid=os.getpid(),
            http=self.http_address,
            stream=self.stream_address,
            state=self.state,
            epoch=self.view.epoch,
            nonce=self.view.nonce,
            number=self.view.number,
            blocks=0 if statistics is None else statistics.blocks,
            segments=0 if statistics is None else statistics.segments,
            resident_bytes=0 if statistics is None else statistics.resident_bytes,
            disk_bytes=0 if statistics is None else statistics.disk_bytes,
            log_bytes=0 if snapshots is None else snapshots.log_bytes,
            snapshot_age_s=now - self._snapshot_at,
            recovery_s=self.recovery_s,
        )

    def heard(self, reply: control.HeartbeatReply, sent_at: float) -> None:
        """See wire.coordination.Reporting."""
        if self.blocks is not None and reply.lease_ms:
            self.blocks.lease.renewed(sent_at, reply.lease_ms / 1000)
        note_addresses(self.view, reply.nodes)
        if self._opened and not self.view.behind(reply.epoch, reply.number):
            self._caught_up.set()

    async def take(self, view: control.View) -> None:
        """See wire.coordination.Reporting."""
        await self.install(view.slot_map, view.entries, view.number, cluster=view.cluster)
        note_addresses(self.view, view.nodes)

    # --- changes of the view ------------------------------------------------------------------------------------------

    async def install(
        self, packed: PackedSlotMap | None, entries: Sequence[Entry], number: int, *, cluster: str = ""
    ) -> None:
        """Take over what is newer, durably: first in the index, then in the view's file, then in memory.

        `number` is that of the registry the entries come from, which are all it has above ours.
        """
        async with self._taking:
            view = self.view
            slot_map = view.newer_map(None if packed is None else SlotMap.unpacked(packed))
            news = view.news(entries)
            if slot_map is None and not news and number <= view.number and (view.cluster or not cluster):
                return
            await self._enter_durably(news)
            registry = Registry(view.registry.entries(), view.registry.number)
            registry.apply(news, number)
            newer = ClusterView(view.cluster or cluster, slot_map or view.slot_map, registry, view.addresses)
            if self._view_file is not None:
                await keep_view(self._view_file, newer)
            view.cluster, view.slot_map, view.registry = newer.cluster, newer.slot_map, newer.registry
            self._news.set()
            self._news = asyncio.Event()

    async def learn(self, number: int) -> None:
        """Until this shard has a change without a key that somebody knows of."""
        self.line.hurry()
        while self.view.number < number:
            await self._news.wait()

    async def _enter_durably(self, entries: Sequence[Entry]) -> None:
        """Enter changes without a key into the index. Each is harmless when it is entered again."""
        index, liveness = self.index, self.liveness
        if index is None or liveness is None:
            return
        now = asyncio.get_running_loop().time()
        workers = index.state.workers
        for entry in entries:
            match entry:
                case NamespaceEntry():
                    index.create_namespace(entry.spec, self.view.registry.purges(entry.spec.tenant))
                case TenantEntry():
                    for namespace in list(self.view.registry.namespaces.values()):
                        if namespace.spec.tenant == entry.tenant:
                            index.create_namespace(namespace.spec, entry.purges)
                case WorkerEntry():
                    number = workers.find(*entry.worker)
                    known = 0 if number is None else workers.generation(number)
                    if entry.generation > known:
                        await index.clear_worker(entry.worker, generation=entry.generation)
                    liveness.registered(entry, now)
        if entries:
            await index.sync()

    def note_heard(self, workers: Sequence[Worker]) -> None:
        """A router has heard these workers."""
        if self.liveness is not None:
            self.liveness.heard(workers, asyncio.get_running_loop().time())

    # --- ending -------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more changes, finish those under way, take a snapshot; the process ends after that."""
        self.state = "draining"
        self.why = "draining"
        self.line.hurry()
        if self.blocks is not None:
            self.blocks.draining = True
            await self.blocks.finish()
        if self.index is not None:
            await self.index.snapshot()
        try:
            await self._note_drained()
        except (OSError, StorageError) as error:
            logger.warning("that this shard was drained cannot be noted: %s", error)
        self.ended.set()

    async def _note_drained(self) -> None:
        """For whoever starts shards on this machine: it need not be the coordinator that had this one drained."""
        file = await RecordFile.open(self._settings.directory / "drained", self._file_system)
        try:
            await file.write(str(os.getpid()).encode())
        finally:
            await file.close()

    async def close(self) -> None:
        """Make everything durable and let go of the directory."""
        if self.blocks is not None:
            self.blocks.draining = True
            self.blocks.lease.end()
            await self.blocks.finish()
            self.blocks.index = None
        if self.index is not None:
            await self.index.close()
        if self._view_file is not None:
            await self._view_file.close()
