"""One SARP index over one segment store: what a shard serves, and what `sarp replay` measures.

Owned by one event loop. A match or insert whose segments are in memory or in the page cache completes without
suspending.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Final, Self

from sarp_cluster import limits
from sarp_cluster.config import IndexConfig, Strategy
from sarp_cluster.core.answering import MatchAnswer
from sarp_cluster.errors import SnapshotDamagedError, StoreFullError
from sarp_cluster.storage.file_system import DISK, FileSystem, run_to_end
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.manifest import set_aside
from sarp_cluster.storage.recovery import Progress
from sarp_cluster.storage.segment_store import SegmentStore
from sarp_cluster.storage.store_directory import load_secret
from sarp_cluster.types import CandidateCounts, IndexStatistics, InsertResult, Namespace, NamespaceSpec, Tier, Worker
from shard import insert_path, match_path, validation
from shard.background import Background
from shard.namespaces import IndexNamespace, NamespaceRegistry
from shard.recovery import restore
from shard.requests import check_worker
from shard.snapshots import Snapshots
from shard.state import IndexState

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors that pass once there is space again."""


class Index:
    """An open index. Make one with `open`, and `close` it."""

    def __init__(self, state: IndexState, namespaces: NamespaceRegistry, snapshots: Snapshots) -> None:
        self.state = state
        self.namespaces = namespaces
        self.snapshots = snapshots
        self.background = Background(state, namespaces)
        self._wake = asyncio.Event()
        self._snapshot_wake = asyncio.Event()
        self._runners: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        directory: Path,
        config: IndexConfig | None = None,
        *,
        secret: bytes | None = None,
        progress: Progress | None = None,
        file_system: FileSystem = DISK,
    ) -> Self:
        """The index in `directory`: a new one if that is empty or absent, else recovered from what stands there.

        `secret` (16 to 64 bytes) keys the namespaces' block IDs; without one, the store keeps a random secret of its
        own. `progress` is told (bytes replayed, bytes in all). Raises StorageError when another process has the store
        open, CorruptRecordError when acknowledged records are damaged. `file_system` is for tests.
        """
        config = config or IndexConfig()
        while True:
            store, recovered = await LogStore.open(
                directory,
                segment_blocks=config.segment_blocks,
                layout=config.layout,
                file_bytes_max=config.log_file_bytes,
                progress=progress,
                file_system=file_system,
            )
            try:
                if secret is None:
                    secret = await run_to_end(lambda: load_secret(directory, file_system))
                state = IndexState(config, store, recovered.table)
                namespaces = NamespaceRegistry(secret, store)
                await restore(state, namespaces, recovered)
                snapshots = Snapshots(state, namespaces, directory, file_system)
                snapshots.begin_after(recovered.snapshots, recovered.log.replayed_bytes)
            except SnapshotDamagedError:
                await run_to_end(partial(set_aside, file_system, directory, recovered.snapshots.usable[0].manifest))
                await store.close()
                continue  # with the one before, or without
            except BaseException:
                await store.close()
                raise
            break
        state.directory.journaling = True
        store.journal = state.directory.take_journal
        index = cls(state, namespaces, snapshots)
        index.start_background()
        return index

    @property
    def store(self) -> SegmentStore:
        """The segment store."""
        return self.state.store

    # --- what callers do ----------------------------------------------------------------------------------------------

    def create_namespace(self, spec: NamespaceSpec, purges: int = 0) -> IndexNamespace:
        """The namespace of `spec`; the same again is the same. An empty one after its tenant was purged once more."""
        return self.namespaces.create(spec, purges)

    async def match(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        detail: str = "workers",
        tiers: Collection[Tier] | None = None,
        workers: Collection[Worker] | None = None,
        max_workers: int | None = None,
        strategy: Strategy | None = None,
    ) -> MatchAnswer:
        """Longest prefix of `block_ids` (wire IDs, u64 little-endian) that somebody holds, and who holds it.

        `detail` "none" gives lengths only, "workers" what each worker holds, "blocks" each block's locations too.
        `tiers` and `workers` limit whose locations count; `max_workers` cuts the list of workers. `strategy` overrides
        the index's.
        """
        return await match_path.match(
            self.state,
            self.namespaces.require(namespace),
            block_ids,
            detail=detail,
            tiers=tiers,
            workers=workers,
            max_workers=max_workers,
            strategy=strategy,
        )

    async def insert(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        worker: Worker,
        generation: int = 0,
        tier: Tier = Tier.GPU,
        first: int = 0,
        offset: int = 0,
        seq: int | None = None,
        handle: int | None = None,
        durable: bool = True,
        completes: bool = True,
    ) -> InsertResult:
        """`worker` newly holds the blocks at positions [first, end) of the sequence on `tier`.

        `block_ids` are the wire IDs of positions [offset, end); `offset` is 0, or a multiple of the segment size at
        least one segment before `first` whose prefix is in the index (else UnknownPrefixError). Ancestors that are
        missing are inserted without locations. A `generation` newer than the worker's ends everything it held before;
        an older one is refused. With `seq`, a change that was applied before is not applied again. `handle` is kept and
        given back with the blocks. `durable`: answer only once the change is synced to the disk; otherwise that follows
        within about a tenth of a second, and the answer says which it was. Not `completes`: the seq is compared but not
        kept, because another part of the same change follows.
        """
        try:
            return await insert_path.insert(
                self.state,
                self.namespaces.require(namespace),
                block_ids,
                worker=worker,
                generation=generation,
                tier=tier,
                first=first,
                offset=offset,
                seq=seq,
                handle=handle,
                durable=durable,
                completes=completes,
            )
        finally:
            self._wake_background()

    async def remove(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        worker: Worker,
        generation: int = 0,
        tier: Tier | None = None,
        first: int = 0,
        last: int | None = None,
        seq: int | None = None,
        durable: bool = True,
        completes: bool = True,
    ) -> int:
        """`worker` no longer holds positions [first, last) of the sequence on `tier` (None: on any).

        The blocks stay in the index. Returns how many segments changed. `seq` and `completes` as in `insert`.
        """
        try:
            return await insert_path.remove(
                self.state,
                self.namespaces.require(namespace),
                block_ids,
                worker=worker,
                generation=generation,
                tier=tier,
                first=first,
                last=last,
                seq=seq,
                durable=durable,
                completes=completes,
            )
        finally:
            self._wake_background()

    async def clear_worker(self, worker: Worker, *, generation: int) -> None:
        """The worker's cache is in `generation` now: everything older of it is dead at once."""
        await insert_path.clear_worker(self.state, check_worker(worker), generation)

    def is_new(self, worker: Worker, generation: int, seq: int | None) -> bool:
        """Was a change of this seq not applied yet? Raises StaleGenerationError where the worker is further."""
        return insert_path.check_change(self.state, worker, generation, seq)

    async def sync(self) -> None:
        """Wait until everything that was applied so far is durable."""
        await insert_path.make_durable(self.state)

    def count_candidates(self, namespace: Namespace, block_ids: bytes) -> CandidateCounts:
        """What routing and filtering leave to retrieve for this query; reads nothing, changes nothing."""
        return match_path.count_candidates(self.state, self.namespaces.require(namespace), block_ids)

    # --- background ---------------------------------------------------------------------------------------------------

    def start_background(self) -> None:
        """Run the background work until `close`."""
        create_task = asyncio.get_running_loop().create_task
        self._runners = [
            create_task(self._run_background(), name="sarp-background"),
            create_task(self._run_snapshots(), name="sarp-snapshots"),
        ]
        self._wake.set()  # recovery may have found back-fills that are due, and left loading to be done
        self._snapshot_wake.set()

    def _wake_background(self) -> None:
        """Something has changed, or was refused because the store is full."""
        if self.background.due or self.state.store.full:
            self._wake.set()
        if self.snapshots.due:
            self._snapshot_wake.set()

    async def failed(self) -> None:
        """Wait until the background work ends before its time, and raise what ended it. The index cannot go on then."""
        if self._runners:
            done, _ = await asyncio.wait(self._runners, return_when=asyncio.FIRST_COMPLETED)
            for runner in done:
                runner.result()

    async def stop_background(self) -> None:
        """End the background work. Raises what ended it before its time."""
        runners, self._runners = self._runners, []
        for runner in runners:
            runner.cancel()
        ended = await asyncio.gather(*runners, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    async def _run_background(self) -> None:
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if timer is not None:
                    timer.cancel()
                try:
                    while await self.background.step(now=loop.time()):
                        await asyncio.sleep(self.background.pause)  # foreground work first
                except SnapshotDamagedError as error:
                    await self.snapshots.refuse(error)
                    raise
                # Space of a full store may come back from elsewhere.
                full = self.state.store.full
                wait_s = limits.FULL_RETRY_MS / 1000 if full else self.background.wait_s(loop.time())
                timer = None if wait_s is None else loop.call_later(wait_s, self._wake.set)
        finally:
            if timer is not None:
                timer.cancel()

    async def _run_snapshots(self) -> None:
        """Beside the other background work: a snapshot waits for the disk, and a back-fill must not wait for it."""
        while True:
            await self._snapshot_wake.wait()
            self._snapshot_wake.clear()
            while self.snapshots.due:
                try:
                    await self.snapshots.step()
                except (OSError, StoreFullError) as error:
                    if isinstance(error, OSError) and error.errno not in FULL:
                        self.state.store.poison(error)
                        raise
                    await asyncio.sleep(limits.FULL_RETRY_MS / 1000)

    async def backfill_step(self) -> bool:
        """One bounded piece of background work. False when nothing was due."""
        if await self.background.step():
            return True
        if self.snapshots.due and not self.state.store.full:
            await self.snapshots.step()
            return True
        return False

    async def drain_backfill(self) -> None:
        """Wait until no background work is due."""
        while await self.backfill_step():
            await asyncio.sleep(0)

    async def snapshot(self) -> None:
        """Take a snapshot now: a restart replays only what comes after it."""
        await self.snapshots.take()

    async def load_all(self) -> None:
        """Wait until all that recovery left on the disk is in memory; it is loaded in the background otherwise."""
        await self.state.loader.load_all()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def statistics(self) -> IndexStatistics:
        """Counters at this moment."""
        table, directory, store = self.state.table, self.state.directory, self.state.store.statistics()
        reclaim = self.background.reclaim
        return IndexStatistics(
            segments=table.segments,
            blocks=table.blocks,
            block_entries=table.block_entries,
            routing_entries=directory.entries,
            registrations=directory.registrations,
            resident_bytes=directory.resident_bytes + table.resident_bytes,
            disk_bytes=store.disk_bytes,
            live_disk_bytes=store.live_bytes,
            backfills_pending=self.background.backfills_pending,
            deltas_unfolded=table.deltas,
            reclaimed_files=reclaim.files_reclaimed if reclaim else 0,
            reclaimed_bytes=reclaim.bytes_reclaimed if reclaim else 0,
            rewritten_bytes=reclaim.bytes_rewritten if reclaim else 0,
            unloaded_chunks=self.state.loader.unloaded,
            damaged_segments=store.damaged,
            scrubbed_segments=self.background.scrub.segments_read,
            blocked_files=reclaim.files_blocked if reclaim else 0,
        )

    async def validate(self) -> None:
        """Read everything and raise InvariantViolationError for the first violated invariant. For tests and tools."""
        await self.load_all()
        await validation.validate(self.state)

    async def close(self) -> None:
        """Finish, make everything durable, and let go of the store."""
        try:
            await self.stop_background()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, self.state.readers.shutdown)
            await self.state.store.close()
