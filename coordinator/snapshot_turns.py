"""Whose turn it is to take a snapshot: one shard at a time, the most urgent first (design §7).

They share disks, and their callers' patience. Pure: time comes in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from coordinator.instructions import Instruction, Note, TakeSnapshot
from coordinator.tracked_shard import TrackedShard
from sarp_cluster import limits
from sarp_cluster.wire.control import ShardHeartbeat

PAUSE_S: Final = 30.0
"""After a snapshot that failed."""
HEARD_AGAIN_S: Final = 2 * limits.HEARTBEAT_MS / 1000
"""After a snapshot: what was reported before does not count any more."""


class _UnderWay(NamedTuple):
    shard: str
    began: float


class SnapshotTurns:
    """The snapshot under way, if there is one, and when each shard may be next."""

    def __init__(self) -> None:
        self.under_way: _UnderWay | None = None
        self._wanted: set[str] = set()  # names of shards, so at most limits.SHARDS_MAX
        self._not_before: dict[str, float] = {}

    def want(self, name: str) -> None:
        """An operator asks for one."""
        self._wanted.add(name)

    def next(self, shards: Iterable[TrackedShard], now: float) -> list[Instruction]:
        """Begin one, if it is time for it."""
        out: list[Instruction] = []
        if self.under_way is not None:
            if now - self.under_way.began < limits.SNAPSHOT_TIMEOUT_MS / 1000:
                return out
            out += self.done(self.under_way.shard, "no answer in time", now)
        due = [
            (shard.name in self._wanted, report.log_bytes, shard.name)
            for shard in shards
            if (report := shard.report) is not None
            and shard.state == "serving"
            and (shard.name in self._wanted or (now >= self._not_before.get(shard.name, now) and _due(report)))
        ]
        if due:
            name = max(due)[2]
            self.under_way = _UnderWay(name, now)
            self._wanted.discard(name)
            out.append(TakeSnapshot(name))
        return out

    def done(self, name: str, error: str | None, now: float) -> list[Instruction]:
        """It has ended."""
        if self.under_way is None or self.under_way.shard != name:
            return []  # it was given up before
        took = now - self.under_way.began
        self.under_way = None
        self._not_before[name] = now + (HEARD_AGAIN_S if error is None else PAUSE_S)
        if error is None:
            return [Note(name, "snapshot_taken", f"in {took:.2f} s")]
        return [Note(name, "snapshot_failed", error)]


def _due(report: ShardHeartbeat) -> bool:
    return report.log_bytes >= limits.SNAPSHOT_DUE_LOG_BYTES or (
        report.log_bytes > 0 and report.snapshot_age_s >= limits.SNAPSHOT_DUE_AGE_MS / 1000
    )
