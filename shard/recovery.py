"""After the log was replayed: namespaces, workers, and the routing directory, before the first answer.

From a snapshot the directory takes the runs, of which nothing is read yet, and the changes that the log has behind
them. Without one it is rebuilt from the segments' own block IDs. That finds again each back-fill that was due, since a
list that is over a threshold makes one due whenever a segment is registered in it; a snapshot names them.
"""

from __future__ import annotations

from typing import Final

from sarp_cluster.core.posting_run import PostingRun
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, SnapshotDamagedError, StorageError
from sarp_cluster.storage.run_file import FIRST_SLOT, PAGE_ROWS
from sarp_cluster.storage.snapshot import RecoveredStore, Snapshot
from shard.namespaces import NamespaceRegistry
from shard.state import IndexState

SEGMENTS_A_READ: Final = 1_024

READ: Final = 1
"""State of a segment whose records verified."""

PAGES_SAMPLED: Final = 8
"""Pages of the segment table from each of which a segment is read again before a restored snapshot is trusted."""

SEGMENTS_A_PAGE: Final = 8
"""So many are, where none of the first can be read: that a few are damaged says nothing about the snapshot. Each costs
a chunk of the directory for each of its levels, which a large store has to read."""


async def restore(state: IndexState, namespaces: NamespaceRegistry, recovered: RecoveredStore) -> None:
    """Put an index together from a replayed log.

    Raises SnapshotDamagedError if its snapshot is not what the log says, StorageError if the log is not.
    """
    log = recovered.log
    for namespace in log.namespaces:
        namespaces.restore(namespace)
    for worker in log.workers:
        index = state.workers.add(worker.instance_id, worker.dp_rank)
        if index != worker.number:
            raise StorageError(f"worker {worker.instance_id!r} has index {index}, the log says {worker.number}")
        state.workers.set_generation(index, worker.generation)
        state.workers.set_seq(index, worker.seq)
    if recovered.snapshot is None:
        await _rebuild(state)
        return
    try:
        _take_runs(state, recovered.snapshot, log.routing)
        await _check_sample(state)
    except (CorruptRecordError, ValueError) as error:
        raise SnapshotDamagedError(str(error)) from error


def _take_runs(state: IndexState, snapshot: Snapshot, routing: list[bytes]) -> None:
    counters = snapshot.manifest.counters
    for file in snapshot.files:
        state.directory.attach(PostingRun.lazy(file.entry.number, file.posting_index))
    state.directory.restore_counts(counters.registrations, counters.entries, snapshot.manifest.building)
    state.loader.use(snapshot.files)
    state.directory.apply_journal(routing)
    state.points.due.extend(sorted(state.directory.building))


async def _check_sample(state: IndexState) -> None:
    """Read a few segments again and look them up: a restore that lost something must not pass for a success."""
    table = state.table
    pages = -(-(table.slots_end - FIRST_SLOT) // PAGE_ROWS)
    sampled = (
        sorted({pages * sample // PAGES_SAMPLED for sample in range(PAGES_SAMPLED)} | {pages - 1}) if pages else []
    )
    await state.loader.load_pages(sampled)
    slots: list[int] = []
    for a_page in (1, SEGMENTS_A_PAGE):
        slots = [slot for page in sampled for slot in _some_used(table, page, a_page)]
        if table.segments and not slots:
            raise CorruptRecordError(f"none of {table.segments} segments was found")
        if not slots or await _can_be_read(state, slots):
            return
    raise CorruptRecordError(f"none of {len(slots)} segments can be read")


async def _can_be_read(state: IndexState, slots: list[int]) -> bool:
    """Can any of these segments be read? Raises CorruptRecordError where one that can is not in the directory."""
    search = state.search()
    while not search.load_segments(slots):
        await state.loader.load_missed()
    await state.wait_for(search.batch)
    while True:
        unregistered = state.points.unregistered(search.batch)
        if not state.loader.missed:
            break
        await state.loader.load_missed()
    if unregistered:
        raise CorruptRecordError(f"segments {unregistered} are not in the routing directory")
    read = any(segment["state"] == READ for segment in search.batch.describe())
    state.idle_searches.append(search)
    return read


def _some_used(table: SegmentTable, page: int, wanted: int) -> list[int]:
    """So many slots of a page that have a segment, or as many as there are, spread over it."""
    slots, _ = table.slots_from(FIRST_SLOT + page * PAGE_ROWS, PAGE_ROWS, PAGE_ROWS)
    return slots[:: -(-len(slots) // wanted)] if slots else []


async def _rebuild(state: IndexState) -> None:
    registered = damaged = 0
    for slots in state.table.slots_in_use(SEGMENTS_A_READ):
        search = state.search()
        search.load_segments(slots)
        await state.wait_for(search.batch)
        damaged += state.points.register_batch(search.batch)
        registered += len(slots)
        state.idle_searches.append(search)
    # A restore that lost something must not pass for a success.
    if registered != state.table.segments:
        raise StorageError(f"{registered} segments were registered, the table has {state.table.segments}")
    if damaged and damaged == registered:
        raise StorageError(f"none of {registered} segments can be read: this is not the store that was written")
