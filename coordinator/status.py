"""The cluster as its coordinator sees it: for callers, for Prometheus, for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, get_args

from coordinator.control_loop import ControlLoop
from coordinator.tracked_shard import TrackedShard
from sarp_cluster.observe.metrics import Metric
from sarp_cluster.wire import messages

STATES: Final[tuple[str, ...]] = get_args(messages.ShardState)


def _lease_left_s(shard: TrackedShard, now: float) -> float:
    return max(0.0, shard.lease_end - now) if shard.holder is not None else 0.0


def shard_status(term: ControlLoop, shard: TrackedShard, now: float) -> messages.ShardStatus:
    """One shard."""
    report, slot_map = shard.report, term.machine.slot_map
    owns = slot_map is not None and shard.name in slot_map.shards
    return messages.ShardStatus(
        shard=shard.name,
        state=shard.state,
        http=shard.http,
        stream=shard.stream,
        incarnation=shard.incarnation,
        slots=len(slot_map.slots_of(shard.name)) if slot_map is not None and owns else 0,
        epoch=shard.epoch,
        number=shard.number,
        blocks=0 if report is None else report.blocks,
        segments=0 if report is None else report.segments,
        resident_bytes=0 if report is None else report.resident_bytes,
        disk_bytes=0 if report is None else report.disk_bytes,
        lease_left_s=_lease_left_s(shard, now),
        snapshot_age_s=0.0 if report is None else report.snapshot_age_s,
        log_bytes=0 if report is None else report.log_bytes,
        recovery_s=0.0 if report is None else report.recovery_s,
    )


def cluster_reply(
    term: ControlLoop, *, coordinator: str, routers: list[messages.RouterStatus], now: float
) -> messages.ClusterReply:
    """All of it."""
    view = term.view
    return messages.ClusterReply(
        cluster=view.cluster,
        coordinator=coordinator,
        leading=True,
        epoch=view.epoch,
        number=view.number,
        splits=0 if view.slot_map is None else len(view.slot_map.splits),
        shards=[shard_status(term, shard, now) for _, shard in sorted(term.machine.shards.items())],
        routers=routers,
    )


def shard_metrics(term: ControlLoop, now: float) -> list[Metric]:
    """What Prometheus wants to know of the shards, each metric for all of them."""
    shards = [shard for _, shard in sorted(term.machine.shards.items())]
    found = [
        Metric(
            "sarp_coordinator_shard_state",
            "gauge",
            "1 for the state a shard is in.",
            int(shard.state == state),
            (("shard", shard.name), ("state", state)),
        )
        for shard in shards
        for state in STATES
    ]
    found += _each("lease_left_seconds", "Of its lease.", ((shard, _lease_left_s(shard, now)) for shard in shards))
    found += _each("probes_failed", "In a row.", ((shard, shard.probes_failed) for shard in shards))
    reports = [(shard, shard.report) for shard in shards if shard.report is not None]
    found += _each("log_bytes", "Behind its last snapshot.", ((shard, report.log_bytes) for shard, report in reports))
    found += _each("blocks", "In its index.", ((shard, report.blocks) for shard, report in reports))
    return found


def _each(name: str, what: str, values: Iterable[tuple[TrackedShard, Any]]) -> list[Metric]:
    return [
        Metric(f"sarp_coordinator_shard_{name}", "gauge", what, value, (("shard", shard.name),))
        for shard, value in values
    ]


def facts(term: ControlLoop, now: float) -> list[tuple[str, str]]:
    """The page's table."""
    found = [("slot map", str(term.view.epoch)), ("changes without a key", str(term.view.number))]
    for _, shard in sorted(term.machine.shards.items()):
        status = shard_status(term, shard, now)
        found.append(
            (
                f"shard {shard.name}",
                f"{status.state} for {now - shard.since:,.0f} s · {status.slots} slots · {status.blocks:,} blocks · "
                f"{status.disk_bytes / 1e6:,.1f} MB on disk · {status.log_bytes / 1e6:,.1f} MB behind the snapshot · "
                f"lease {status.lease_left_s:.0f} s · {shard.stream or 'no address yet'}",
            )
        )
    return found
