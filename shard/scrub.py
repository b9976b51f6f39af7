"""The scrub: reads every segment now and then, slowly, so that what has rotted is found before it is needed.

A segment that does not verify is counted and repaired (shard.repair), or else restored by the next insert that can
(core.matching).
The chunks of a snapshot are verified by the warmer when the index is opened.
"""

from __future__ import annotations

from sarp_cluster import limits
from sarp_cluster.storage.log_scan import unreadable
from shard.repair import repair
from shard.state import IndexState


class Scrub:
    """One round over all segments after the other, in bounded steps."""

    def __init__(self, state: IndexState) -> None:
        self._state = state
        self._hand = 0
        self._due_at: float | None = None
        """On the clock that is handed in; None: as soon as everything is in memory."""
        self._damaged = 0
        self.segments_read = 0
        """Since the index was opened."""
        self.damaged: int | None = None
        """Segments that the last whole round could not read; None: none has ended."""

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next step; None: not before everything is in memory."""
        if self._state.loader.unloaded:
            return None
        return 0.0 if self._due_at is None else max(0.0, self._due_at - now)

    async def step(self, now: float) -> bool:
        """Read a few segments."""
        state = self._state
        slots, self._hand = state.table.slots_from(
            self._hand, limits.SCRUB_ROWS_A_STEP, limits.BACKFILL_SEGMENTS_A_STEP
        )
        if slots:
            search = state.search()
            search.load_segments(slots)
            await state.wait_for(search.batch)
            damaged = unreadable(search.batch)
            self._damaged += len(damaged)
            self.segments_read += len(slots)
            state.idle_searches.append(search)
            for slot in damaged:
                await repair(state, slot)
        self._due_at = now + len(slots) / limits.SCRUB_SEGMENTS_A_SECOND
        if self._hand == 0:
            self.damaged, self._damaged = self._damaged, 0
            self._due_at = now + limits.SCRUB_PAUSE_S
        return True
