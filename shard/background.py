"""Background work of an index, in bounded steps that yield to matches and inserts.

In this order: back-fills (refinement and rematerialisation, paper §4.2 and §4.4), the merge of the directory's overlay
into a new base, folding deltas into images, and reclaiming the space of log files.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from sarp_cluster import limits
from sarp_cluster.core.refinement import Backfill
from sarp_cluster.errors import StoreFullError
from sarp_cluster.storage.log import LogStore
from shard.namespaces import NamespaceRegistry
from shard.reclaim import Reclaim
from shard.rewriting import rewrite
from shard.state import IndexState

FOLD_ROWS_A_STEP: Final = 8_192
"""Rows of the segment table that one step looks through for deltas."""


class Background:
    """What is due, and one step of it at a time."""

    def __init__(self, state: IndexState, namespaces: NamespaceRegistry) -> None:
        self._state = state
        self.reclaim: Reclaim | None = None
        if isinstance(state.store, LogStore) and state.config.reclaim_ratio is not None:
            self.reclaim = Reclaim(state, namespaces, state.store, ratio_max=state.config.reclaim_ratio)
        self._queue: deque[Backfill] = deque()
        self._fold_hand = 0
        self._round_folded = True  # the first round may begin anywhere
        self._unfoldable_at = -1
        """Version of the segment table of which a whole round could fold nothing: what is left is damaged."""
        self._stepping = asyncio.Lock()  # two steps of one back-fill must not overlap; held across our own reads only
        self.damaged = 0
        """Segments that a back-fill had to leave out because they could not be read."""

    @property
    def backfills_pending(self) -> int:
        """Posting lists whose finer entries are being built."""
        return len(self._queue) + len(self._state.points.due)

    @property
    def due(self) -> bool:
        """Is there anything to do that does not wait for its time?"""
        state = self._state
        return bool(
            self._queue
            or state.points.due
            or state.directory.merging
            or self._merge_due()
            or self._fold_due()
            or (self.reclaim is not None and self.reclaim.due)
        )

    def wait_s(self, now: float) -> float | None:
        """Seconds until something is due that waits for its time, after all else was done; None: there is nothing."""
        return None if self.reclaim is None else self.reclaim.wait_s(now)

    def _fold_due(self) -> bool:
        table, store = self._state.table, self._state.store
        return (
            table.deltas > self._state.config.delta_segments_max
            and table.version != self._unfoldable_at
            and not store.full
        )

    def _merge_due(self) -> bool:
        """Each merge moves the whole base, so the overlay may grow with it: the work stays in proportion."""
        directory = self._state.directory
        return directory.overlay_postings >= max(self._state.config.merge_postings_min, directory.base_postings // 4)

    async def step(self, *, now: float | None = None) -> bool:
        """Do one bounded piece of work. False when nothing was due, or there is no space for it.

        With `now`, also when what is due has to wait for its time.
        """
        async with self._stepping:
            try:
                return await self._step(now)
            except StoreFullError:
                return False

    async def _step(self, now: float | None) -> bool:
        if self._queue or self._state.points.due:
            await self._backfill_step()
        elif self._state.directory.merging or self._merge_due():
            self._state.directory.begin_merge()
            self._state.directory.merge_step(limits.MERGE_POSTINGS_A_STEP)
        elif self._fold_due():
            await self._fold_step()
        elif self.reclaim is not None and (now is None or self.reclaim.wait_s(now) == 0):
            return await self.reclaim.step()
        else:
            return False
        return True

    async def _backfill_step(self) -> None:
        state = self._state
        for key, point, kind in state.points.due:
            self._queue.append(Backfill(state.points, key, point, kind))
        state.points.due.clear()
        backfill = self._queue[0]
        search = state.search()
        batch = search.batch
        if backfill.next_segments(state.table, batch, limits.BACKFILL_SEGMENTS_A_STEP):
            if state.store.read_cached(batch):
                await state.wait_for(batch)
            self.damaged += backfill.register_batch(state.table, batch)
        else:
            backfill.publish()
            self._queue.popleft()
        state.idle_searches.append(search)

    async def _fold_step(self) -> None:
        """Write whole images of some segments whose image and delta are apart."""
        state = self._state
        slots, self._fold_hand = state.table.slots_with_delta(
            self._fold_hand, FOLD_ROWS_A_STEP, limits.BACKFILL_SEGMENTS_A_STEP
        )
        if slots:
            await state.store.room()
            if (await rewrite(state, slots)).segments:
                self._round_folded = True
        if self._fold_hand == 0:
            if not self._round_folded:
                self._unfoldable_at = state.table.version
            self._round_folded = False
