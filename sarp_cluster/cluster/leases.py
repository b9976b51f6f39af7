"""A shard's right to acknowledge changes, limited in time (design §7).

Counted on the holder's monotonic clock from when the renewal was *sent*, so that it ends for the holder before it does
for whoever granted it. A margin is kept, within which what was already under way can be acknowledged.
"""

from __future__ import annotations

from sarp_cluster import limits


class Lease:
    """A lease as its holder sees it. Times are seconds of one monotonic clock, which must go on while suspended."""

    __slots__ = ("_end", "margin_s")

    def __init__(self, margin_s: float = limits.LEASE_MARGIN_MS / 1000) -> None:
        self.margin_s = margin_s
        self._end = float("-inf")

    def renewed(self, sent_at: float, ttl_s: float) -> None:
        """It was granted for `ttl_s`, in answer to what was sent at `sent_at`. It never gets shorter."""
        self._end = max(self._end, sent_at + ttl_s)

    def end(self) -> None:
        """It was taken away."""
        self._end = float("-inf")

    def left_s(self, now: float) -> float:
        """Seconds in which changes may still be acknowledged; 0 when none."""
        return max(0.0, self._end - self.margin_s - now)

    def valid(self, now: float) -> bool:
        """May a change be acknowledged now?"""
        return now < self._end - self.margin_s
