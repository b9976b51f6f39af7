"""After the log was replayed: namespaces, workers, and the routing directory, before the first answer.

The directory is rebuilt from the segments' own block IDs. That finds again each back-fill that was due, since a list
that is over a threshold makes one due whenever a segment is registered in it.
"""

from __future__ import annotations

from typing import Final

from sarp_cluster.errors import StorageError
from sarp_cluster.storage.recovery import RecoveredLog
from shard.namespaces import NamespaceRegistry
from shard.state import IndexState

SEGMENTS_A_READ: Final = 1_024


async def restore(state: IndexState, namespaces: NamespaceRegistry, log: RecoveredLog) -> None:
    """Put an index together from a replayed log. Raises StorageError if the outcome is not what the log has."""
    for namespace in log.namespaces:
        namespaces.restore(namespace)
    for worker in log.workers:
        index = state.workers.add(worker.instance_id, worker.dp_rank)
        if index != worker.number:
            raise StorageError(f"worker {worker.instance_id!r} has index {index}, the log says {worker.number}")
        state.workers.set_generation(index, worker.generation)
        state.workers.set_seq(index, worker.seq)
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
