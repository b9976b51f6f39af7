"""Writing segments anew, whole, at the end of the log: folding deltas, and leaving a log file that is to go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sarp_cluster.storage.log_scan import unreadable
from shard.state import IndexState


class Rewritten(NamedTuple):
    """What was written."""

    segments: int
    bytes: int
    unreadable: list[int]
    """Slots of segments that are damaged; they are left as they are."""


async def rewrite(state: IndexState, slots: Sequence[int], *, reclaiming: bool = False) -> Rewritten:
    """Write whole images of these segments, but for those that change while they are read.

    `reclaiming`: the space that the store keeps back for that may be used.
    """
    store = state.store
    insertion = state.insertion()
    insertion.search.load_segments(slots)
    batch = insertion.search.batch
    if store.read_cached(batch):
        await state.wait_for(batch)
    segments = insertion.plan_folds()
    before = store.bytes_appended
    if segments:
        store.put(insertion.writes, reclaiming=reclaiming)
        insertion.commit()
    done = Rewritten(segments, store.bytes_appended - before, unreadable(batch))
    state.idle_insertions.append(insertion)
    return done
