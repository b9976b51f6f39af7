"""What the state machine wants done. Who executes it tells the machine what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sarp_cluster.cluster.membership import ShardRecord

RefusalReason: TypeAlias = Literal["identity_clash", "superseded", "epoch_conflict", "too_many"]


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Answer the heartbeat with a lease, counted from when the heartbeat was sent."""

    shard: str
    incarnation: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the heartbeat without a lease."""

    shard: str
    incarnation: str
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class KeepRecord:
    """A shard joined, or came back as another process or at another place: enter it into the membership."""

    record: ShardRecord


@dataclass(frozen=True, slots=True)
class Install:
    """The shard lacks the slot map or changes without a key: give it what it lacks, then say `installed`."""

    shard: str


@dataclass(frozen=True, slots=True)
class FetchView:
    """The shard knows a newer slot map or later changes than we do: take them over."""

    shard: str


@dataclass(frozen=True, slots=True)
class MakeFirstMap:
    """All shards that are expected have joined, and none has ever had a map: make the first, then say `map_made`."""

    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublishMap:
    """A majority of its shards has the map durably: tell everybody."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StartShard:
    """Start the process of a shard that we supervise."""

    shard: str


@dataclass(frozen=True, slots=True)
class KillShard:
    """End the process of a shard that we supervise: it holds the lock of its directory and does not answer."""

    shard: str


@dataclass(frozen=True, slots=True)
class DrainShard:
    """Tell a shard to refuse inserts, finish, take a snapshot and exit; its supervisor is not to start it again."""

    shard: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Tell a shard to take a snapshot, then say `snapshot_done`."""

    shard: str


@dataclass(frozen=True, slots=True)
class Note:
    """Enter this into the timeline."""

    node: str
    kind: str
    text: str


Instruction: TypeAlias = (
    GrantLease
    | Refuse
    | KeepRecord
    | Install
    | FetchView
    | MakeFirstMap
    | PublishMap
    | StartShard
    | KillShard
    | DrainShard
    | TakeSnapshot
    | Note
)
