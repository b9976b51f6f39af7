"""Background work of an index, in bounded steps that yield to matches and inserts.

In this order: back-fills (refinement and rematerialisation, paper §4.2 and §4.4), loading what a snapshot left on the
disk, discarding stale postings, folding deltas into images, and reclaiming the space of log files, which has its share
while there is something else. Snapshots and merges of runs go on beside them (shard.snapshots).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from sarp_cluster import limits
from sarp_cluster.core.refinement import Backfill
from sarp_cluster.core.removal import StalePostings
from sarp_cluster.errors import StoreFullError
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.log_scan import unreadable
from shard.namespaces import NamespaceRegistry
from shard.reclaim import Reclaim
from shard.repair import repair
from shard.rewriting import rewrite
from shard.scrub import Scrub
from shard.state import IndexState

FOLD_ROWS_A_STEP: Final = 8_192
"""Rows of the segment table that one step looks through for deltas."""

RECLAIM_EVERY: Final = 4
"""Of so many steps one is left to reclaiming, when it is ready: else a store that is written to all the time would grow
without end while there are back-fills or folds."""


class Background:
    """What is due, and one step of it at a time."""

    def __init__(self, state: IndexState, namespaces: NamespaceRegistry) -> None:
        self._state = state
        self.reclaim: Reclaim | None = None
        if isinstance(state.store, LogStore) and state.config.reclaim_ratio is not None:
            self.reclaim = Reclaim(state, namespaces, state.store, ratio_max=state.config.reclaim_ratio)
        self._queue: deque[Backfill] = deque()
        self._unreadable: set[int] = set()
        """Segments that the first back-fill of the queue could not read."""
        self._parked: list[tuple[int, int, int]] = []
        """Back-fills that have to wait until a segment is healed: entries that lack one must not be published."""
        self._parked_at = 0
        """What `IndexState.healed` was then."""
        self._since_reclaim = 0
        self.scrub = Scrub(state)
        self._purge: StalePostings | None = None
        self._unpurgeable_at = -1
        """Version of the segment table of which a whole round left stale segments: those are damaged."""
        self._fold_hand = 0
        self._round_folded = True  # the first round may begin anywhere
        self._unfoldable_at = -1
        """Version of the segment table of which a whole round could fold nothing: what is left is damaged."""
        self._stepping = asyncio.Lock()  # two steps of one back-fill must not overlap; held across our own reads only
        self.pause = 0.0
        """Seconds to leave to the foreground after the last step."""
        self.damaged = 0
        """Segments that back-fills could not read."""

    @property
    def backfills_pending(self) -> int:
        """Posting lists whose finer entries are being built."""
        return len(self._queue) + len(self._state.points.due) + len(self._parked)

    @property
    def due(self) -> bool:
        """Is there anything to do that does not wait for its time?"""
        state = self._state
        return bool(
            self._backfill_due
            or state.loader.unloaded
            or self._purge_due()
            or self._fold_due()
            or (self.reclaim is not None and self.reclaim.due)
        )

    @property
    def _backfill_due(self) -> bool:
        if self._parked and self._state.healed != self._parked_at:
            self._state.points.due.extend(self._parked)
            self._parked.clear()
        return bool(self._queue or self._state.points.due)

    def wait_s(self, now: float) -> float | None:
        """Seconds until something is due that waits for its time, after all else was done; None: there is nothing."""
        waits = [self.scrub.wait_s(now), None if self.reclaim is None else self.reclaim.wait_s(now)]
        return min((wait for wait in waits if wait is not None), default=None)

    def _purge_due(self) -> bool:
        table = self._state.table
        return bool(table.stale) and not self._state.loader.unloaded and table.version != self._unpurgeable_at

    def _fold_due(self) -> bool:
        table, store = self._state.table, self._state.store
        return (
            not table.unloaded_pages
            and table.deltas > self._state.config.delta_segments_max
            and table.version != self._unfoldable_at
            and not store.full
        )

    async def step(self, *, now: float | None = None) -> bool:
        """Do one bounded piece of work. False when nothing was due, or there is no space for it.

        With `now`, also when what is due has to wait for its time.
        """
        async with self._stepping:
            self.pause = 0.0
            try:
                return await self._step(now)
            except StoreFullError:
                return False

    async def _step(self, now: float | None) -> bool:
        ready = self.reclaim is not None and (now is None or self.reclaim.wait_s(now) == 0)
        self._since_reclaim += 1
        if self.reclaim is not None and ready and (self._since_reclaim >= RECLAIM_EVERY or self._state.store.full):
            self._since_reclaim = 0
            if await self.reclaim.step():
                return True
        if self._backfill_due:
            await self._backfill_step()
        elif self._state.loader.unloaded:
            await self._state.loader.warm_step()
            self.pause = limits.WARM_PAUSE_MS / 1000
        elif self._purge_due():
            await self._purge_step()
        elif self._fold_due():
            await self._fold_step()
        elif self.reclaim is not None and ready:
            return await self.reclaim.step()
        else:
            return now is not None and self.scrub.wait_s(now) == 0 and await self.scrub.step(now)
        return True

    async def _backfill_step(self) -> None:
        state = self._state
        for key, point, kind in state.points.due:
            self._queue.append(Backfill(state.points, key, point, kind))
        state.points.due.clear()
        backfill = self._queue[0]
        search = state.search()
        batch = search.batch
        more = backfill.next_segments(state.table, batch, limits.BACKFILL_SEGMENTS_A_STEP)
        if state.loader.missed:
            await state.loader.load_missed()
        elif more:
            if state.store.read_cached(batch):
                await state.wait_for(batch)
            while not backfill.in_memory(batch):
                await state.loader.load_missed()
            self._unreadable.update(unreadable(batch))
            self.damaged += backfill.register_batch(state.table, batch)
        elif self._unreadable:
            await self._begin_again(backfill)
        else:
            while not backfill.in_memory(batch):
                await state.loader.load_missed()
            backfill.publish()
            self._queue.popleft()
        state.idle_searches.append(search)

    async def _begin_again(self, backfill: Backfill) -> None:
        """What a back-fill could not read is repaired, and the list gone through again; or else it has to wait."""
        healed = self._state.healed
        repaired = [await repair(self._state, slot) for slot in self._unreadable]
        self._unreadable.clear()
        self._queue.popleft()
        place = backfill.key, backfill.point, backfill.kind
        if all(repaired):
            self._queue.append(Backfill(self._state.points, *place))
        else:
            self._parked.append(place)
            self._parked_at = healed if len(self._parked) == 1 else min(healed, self._parked_at)

    async def _purge_step(self) -> None:
        """Look through some of the directory for postings of what segments were that could not be read."""
        state = self._state
        purge = self._purge = self._purge or StalePostings(state.points, state.table)
        more = purge.next_postings(limits.PURGE_POSTINGS_A_STEP)
        search = state.search()
        search.load_segments(purge.to_read())
        if state.store.read_cached(search.batch):
            await state.wait_for(search.batch)
        purge.discard(search.batch)
        damaged = unreadable(search.batch)
        state.idle_searches.append(search)
        for slot in damaged:
            await repair(state, slot)
        if not more:
            self._purge = None
            if purge.finish():
                self._unpurgeable_at = state.table.version

    async def _fold_step(self) -> None:
        """Write whole images of some segments whose image and delta are apart."""
        state = self._state
        slots, self._fold_hand = state.table.slots_from(
            self._fold_hand, FOLD_ROWS_A_STEP, limits.BACKFILL_SEGMENTS_A_STEP, with_delta=True
        )
        if slots:
            await state.store.room()
            if (await rewrite(state, slots)).segments:
                self._round_folded = True
        if self._fold_hand == 0:
            if not self._round_folded:
                self._unfoldable_at = state.table.version
            self._round_folded = False
