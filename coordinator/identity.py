"""Who may speak for a shard: one process, of one directory, under a map that is ours (design §7).

A process that has its directory's lock is the only one; the lock proves it. So another incarnation of the same store
takes over at once, and does not wait for the lease of the one before. That says nothing about a copy of the directory:
if two are there at once, none of them gets a lease before the others have been silent for as long as one lasts.
"""

from __future__ import annotations

from typing import Final

from coordinator.instructions import Instruction, Note, RefusalReason, Refuse
from coordinator.tracked_shard import TrackedShard
from sarp_cluster import limits
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.wire.control import ShardHeartbeat

CLASH_S: Final = 2 * limits.HEARTBEAT_MS / 1000
"""An incarnation that was taken for gone and goes on for so long is there."""


def refusal(
    shard: TrackedShard, report: ShardHeartbeat, now: float, ours: SlotMap | None, *, silent: bool, lease_s: float
) -> list[Instruction]:
    """Why a heartbeat gets no lease, once the timeline has been told; empty: it gets one.

    `silent`: the present incarnation was not heard for some time.
    """
    if shard.store and report.store != shard.store:
        known, shard.clash_told = shard.clash_told == report.store, report.store
        text = f"another directory ({report.store}, process {report.pid}) calls itself {shard.name}: refused"
        return _refuse(report, "identity_clash", None if known else text)
    if shard.clash:
        return _clashing(shard, report, now, lease_s)
    if report.incarnation in shard.retired and not silent:
        return _ghost(shard, report, now)
    if ours is not None and report.epoch == ours.epoch and report.nonce != ours.nonce:
        known, shard.conflict_told = shard.conflict_told == report.nonce, report.nonce
        text = f"it has another map of the number {report.epoch}, of a coordinator that is not ours: no lease"
        return _refuse(report, "epoch_conflict", None if known else text)
    return []


def _refuse(report: ShardHeartbeat, reason: RefusalReason, text: str | None = None) -> list[Instruction]:
    out: list[Instruction] = [Refuse(report.shard, report.incarnation, reason)]
    if text is not None:
        out.append(Note(report.shard, reason, text))
    return out


def _ghost(shard: TrackedShard, report: ShardHeartbeat, now: float) -> list[Instruction]:
    """A word of a process that was taken for gone: it came late, unless there are more of them."""
    if shard.ghost is None or shard.ghost[0] != report.incarnation:
        shard.ghost = report.incarnation, now
    if now - shard.ghost[1] < CLASH_S:
        return _refuse(report, "superseded")
    shard.clash = {shard.incarnation: now, report.incarnation: now}
    text = f"two processes have its directory's identity ({shard.pid}, {report.pid}): no lease until one is gone"
    return _refuse(report, "identity_clash", text)


def _clashing(shard: TrackedShard, report: ShardHeartbeat, now: float, lease_s: float) -> list[Instruction]:
    shard.clash[report.incarnation] = now
    left = {one: at for one, at in shard.clash.items() if now - at < lease_s}
    shard.clash = left if len(left) > 1 else {}
    return _refuse(report, "identity_clash") if shard.clash else []
