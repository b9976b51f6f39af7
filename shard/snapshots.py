"""Snapshots: writing what has changed, at an exact LSN, while matches and inserts go on (design §5).

A snapshot, and what may happen meanwhile:
  1. at one moment, without awaiting: the routing changes so far are put into the log, the LSN and the log's end are
     noted, the directory's overlay and the table's changed rows are frozen. Later changes go elsewhere;
  2. the frozen rows are copied, a slice at a time; a row that changes before its turn is copied first;
  3. a helper thread packs the frozen overlay and the rows into a run file and syncs it;
  4. once the log is durable through all that the manifest tells, the manifest is published;
  5. the run takes the frozen overlay's place in the directory, and what no kept manifest names is removed.
A merge replaces neighbouring runs by one, in a helper thread throughout, and publishes a manifest of the same LSN.

A step that fails (a full disk) is repeated from where it stands: what is frozen stays frozen and is asked like any
level.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import NamedTuple

from sarp_cluster import limits
from sarp_cluster.core.run_merge import RunMerge
from sarp_cluster.errors import SnapshotDamagedError
from sarp_cluster.storage.file_system import FileSystem, run_to_end
from sarp_cluster.storage.manifest import MANIFESTS_KEPT, Counters, Manifest, publish, set_aside, sweep
from sarp_cluster.storage.registry import NamespaceRecord, WorkerRecord
from sarp_cluster.storage.run_file import RunEntry, RunFile, write_run_file
from sarp_cluster.storage.run_packing import RowMerge
from sarp_cluster.storage.snapshot import FoundSnapshots
from shard.namespaces import NamespaceRegistry
from shard.state import IndexState


class Frozen(NamedTuple):
    """The moment a snapshot is of."""

    lsn: int
    log_file: int
    log_offset: int
    log_files: tuple[int, ...]
    counters: Counters
    building: tuple[tuple[int, int, int], ...]
    merge: RunMerge


def merge_choice(sizes: Sequence[int], runs_max: int = limits.DIRECTORY_RUNS_MAX) -> int:
    """How many of the newest runs to merge, given the postings of each, newest first; 0: none yet.

    Four or more that are of a size become one, so a posting is written again a logarithmic number of times; and where
    there are too many runs to be asked one after the other, the newest two or more.
    """
    total = together = 0
    for size in sizes:
        if together and size > 2 * total:
            break
        total += size
        together += 1
    if together >= limits.RUNS_MERGED_MIN:
        return together
    return max(together, 2) if len(sizes) > runs_max else 0


class Snapshots:
    """Takes the snapshots of one index. One at a time."""

    def __init__(
        self, state: IndexState, namespaces: NamespaceRegistry, directory: Path, file_system: FileSystem
    ) -> None:
        self._state = state
        self._namespaces = namespaces
        self._directory = directory
        self._file_system = file_system
        self._kept: list[Manifest] = []
        self._next_number = 1
        self._taken_at = 0
        self._frozen: Frozen | None = None
        self._merge_due = 0
        self._working = asyncio.Lock()  # one snapshot or merge at a time; held across our own threads' work only
        self.taken = 0
        """Snapshots published since the index was opened."""
        self.bytes_written = 0
        """Of run files and manifests."""

    def begin_after(self, found: FoundSnapshots, log_bytes: int) -> None:
        """Go on from what recovery found; so many bytes of the log lie behind the newest snapshot."""
        self._kept = [snapshot.manifest for snapshot in found.usable][:MANIFESTS_KEPT]
        self._next_number = found.next_number
        self._taken_at = -log_bytes
        if self._kept:
            # Of the one before nobody knows yet where its log begins; it goes with the next that is published.
            self._state.store.keep_from(0 if found.older else self._kept[-1].log_file)
        self._choose_merge()

    async def refuse(self, error: SnapshotDamagedError) -> None:
        """Let no recovery use the snapshots that this damage is part of."""
        damaged = [one for one in self._kept if error.run is None or any(run.number == error.run for run in one.runs)]
        await run_to_end(lambda: set_aside(self._file_system, self._directory, *damaged))

    @property
    def newest(self) -> Manifest | None:
        """The newest manifest."""
        return self._kept[0] if self._kept else None

    @property
    def log_bytes(self) -> int:
        """Bytes of the log behind the newest snapshot: what a restart replays."""
        return self._state.store.bytes_appended - self._taken_at

    @property
    def due(self) -> bool:
        """Has the log grown enough for a snapshot, or is a merge due?"""
        state = self._state
        grown = self.log_bytes >= state.config.snapshot_log_bytes
        return (grown or self._frozen is not None or self._merge_due > 0) and state.loader.damage is None

    async def step(self) -> None:
        """Take the snapshot that is due, or do the merge."""
        async with self._working:
            if self.due and not self._merge_due:
                await self._take()
            if self._merge_due and self._frozen is None:
                await self._merge(self._merge_due)

    async def take(self) -> None:
        """Take a snapshot. Raises OSError where it cannot be written: the one before stays, and it may be repeated."""
        async with self._working:
            if self._merge_due and self._frozen is None:
                await self._merge(self._merge_due)  # the runs are bounded
            await self._take()

    async def merge(self, newest: int) -> None:
        """Merge so many of the newest runs into one."""
        async with self._working:
            await self._merge(newest)

    # --- snapshots ---------------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        state = self._state
        if self._frozen is None:
            await state.loader.load_patched()
            self._frozen = self._freeze()
        frozen = self._frozen
        while state.table.copy_frozen(limits.ROWS_COPIED_A_STEP):
            await asyncio.sleep(0)
        slots, rows = state.table.take_frozen()
        entry = await run_to_end(lambda: self._write_run(frozen.merge, slots, rows))
        namespaces, workers = await self._registry()
        if state.store.durable_lsn < state.store.lsn:
            await state.store.sync()
        manifest = self._manifest(frozen, (entry, *(self._kept[0].runs if self._kept else ())), namespaces, workers)
        await run_to_end(lambda: publish(self._file_system, self._directory, manifest))
        retired = state.directory.finish_merge(frozen.merge)
        state.table.release_frozen()
        self._frozen = None
        self.taken += 1
        await asyncio.get_running_loop().run_in_executor(None, retired.clear)
        await self._published(manifest)

    def _freeze(self) -> Frozen:
        """No await in here: all of this is of one moment."""
        state = self._state
        state.store.append_journal()
        lsn, (log_file, log_offset) = state.store.lsn, state.store.position
        if not self._kept:
            state.store.keep_from(log_file)  # its file must not be reclaimed before this is published
        self._taken_at = state.store.bytes_appended
        table, directory = state.table, state.directory
        table.freeze()
        counters = Counters(
            next_slot=table.slots_end,
            segments=table.segments,
            blocks=table.blocks,
            block_entries=table.block_entries,
            deltas=table.deltas,
            registrations=directory.registrations,
            entries=directory.entries,
            live_bytes=state.store.statistics().live_bytes,
        )
        directory.freeze()
        merge = directory.begin_merge(1, 1, self._take_number())
        return Frozen(lsn, log_file, log_offset, state.store.log_files, counters, tuple(directory.building), merge)

    def _write_run(self, merge: RunMerge, slots: memoryview[int], rows: memoryview[int]) -> RunEntry:
        """In a helper thread: the frozen overlay and rows become a run file."""
        while merge.step(limits.MERGE_POSTINGS_A_STEP):
            sleep(limits.MERGE_PAUSE_S)
        frozen = RowMerge()
        frozen.add_memory(slots, rows)
        return self._write(merge, frozen)

    def _write(self, merge: RunMerge, rows: RowMerge) -> RunEntry:
        entry = write_run_file(self._file_system, self._directory, merge.run, rows)
        self.bytes_written += entry.bytes
        return entry

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    async def _registry(self) -> tuple[tuple[NamespaceRecord, ...], tuple[WorkerRecord, ...]]:
        """Namespaces and workers as they are now, or a little later: the log says again what changes meanwhile."""
        workers: list[WorkerRecord] = []
        table = self._state.workers
        while len(workers) < table.count:
            for number in range(len(workers), min(len(workers) + limits.WORKERS_COPIED_A_STEP, table.count)):
                instance_id, dp_rank = table.names[number]
                workers.append(WorkerRecord(number, instance_id, dp_rank, table.generation(number), table.seq(number)))
            await asyncio.sleep(0)
        return tuple(self._namespaces.records()), tuple(workers)

    def _manifest(
        self,
        frozen: Frozen,
        runs: tuple[RunEntry, ...],
        namespaces: tuple[NamespaceRecord, ...],
        workers: tuple[WorkerRecord, ...],
    ) -> Manifest:
        return Manifest(
            number=self._take_number(),
            lsn=frozen.lsn,
            log_file=frozen.log_file,
            log_offset=frozen.log_offset,
            log_files=frozen.log_files,
            layout=self._state.config.layout,
            counters=frozen.counters,
            runs=runs,
            building=frozen.building,
            namespaces=namespaces,
            workers=workers,
        )

    def _choose_merge(self) -> None:
        self._merge_due = merge_choice([run.postings for run in self._state.directory.runs])

    async def _published(self, manifest: Manifest) -> None:
        """Keep the newest manifests; the log before the oldest of them is needed for segments only."""
        kept = self._kept = [manifest, *self._kept][:MANIFESTS_KEPT]
        self._choose_merge()
        self._state.store.keep_from(kept[-1].log_file)
        await run_to_end(lambda: sweep(self._file_system, self._directory, kept))

    # --- merges ------------------------------------------------------------------------------------------------------

    async def _merge(self, newest: int) -> None:
        """Merge the newest runs into one."""
        state = self._state
        old = self._kept[0]
        await state.loader.load_runs({run.number for run in old.runs[:newest]})
        merge = state.directory.begin_merge(1, newest, self._take_number())
        entry = await run_to_end(lambda: self._merge_runs(merge, old.runs[:newest]))
        manifest = old._replace(number=self._take_number(), runs=(entry, *old.runs[newest:]))
        await run_to_end(lambda: publish(self._file_system, self._directory, manifest))
        retired = state.directory.finish_merge(merge)
        await asyncio.get_running_loop().run_in_executor(None, retired.clear)
        await self._published(manifest)

    def _merge_runs(self, merge: RunMerge, entries: Sequence[RunEntry]) -> RunEntry:
        """In a helper thread: postings in memory, rows from file to file."""
        while merge.step(limits.MERGE_POSTINGS_A_STEP):
            sleep(limits.MERGE_PAUSE_S)
        rows = RowMerge()
        for entry in entries:
            RunFile(self._directory, entry).add_rows(rows)
        return self._write(merge, rows)
