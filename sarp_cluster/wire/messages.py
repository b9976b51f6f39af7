"""The public schema: what callers send and get, on both wires (design §8).

MessagePack maps, or JSON objects; field names as here. A request's unknown field is an error. A new field gets a
default, so that older callers go on. Block IDs are one `bin` of u64 little-endian, token IDs one of u32 little-endian;
in JSON base64 of that; both also as a list of integers. Ranges that need more than one field are checked where they are
used.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from sarp_cluster import limits
from sarp_cluster.types import Event, HashProfile, NamespaceSpec

Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_BYTES_MAX)]
OptionalName = Annotated[str, Meta(max_length=limits.NAME_BYTES_MAX)]
TierName: TypeAlias = Literal["gpu", "cpu", "ssd", "remote"]
TIER_NAMES: tuple[TierName, ...] = ("gpu", "cpu", "ssd", "remote")
Position = Annotated[int, Meta(ge=0, le=limits.REQUEST_BLOCKS_MAX)]
Rank = Annotated[int, Meta(ge=0, le=limits.DP_RANK_MAX)]
Generation = Annotated[int, Meta(ge=0, le=limits.GENERATION_MAX)]
Milliseconds = Annotated[int, Meta(ge=1, le=limits.DEADLINE_MS_MAX)]
BlockIds: TypeAlias = bytes | Annotated[list[int], Meta(max_length=limits.REQUEST_BLOCKS_MAX)]
TokenIds: TypeAlias = bytes | Annotated[list[int], Meta(max_length=limits.REQUEST_TOKENS_MAX)]
Reason: TypeAlias = Literal[
    "shard_down", "shard_slow", "recovering", "moving", "stale_map", "deadline", "overload", "quarantined"
]
"""Why an answer may be shorter than it could be."""
Outcome: TypeAlias = Literal["not_applied", "unknown", "partly_applied"]
"""What is known of a change that failed. Of one that was applied in part the caller sends all again."""
WorkerState: TypeAlias = Literal["live", "silent", "draining", "gone"]


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, gc=False):
    """What every request is."""


class Reply(msgspec.Struct, kw_only=True, gc=False):
    """What every reply is."""


class WorkerName(Request, kw_only=True):
    """A worker."""

    worker: Name
    dp_rank: Rank = 0


# --- blocks -----------------------------------------------------------------------------------------------------------


class Placed(Request, kw_only=True):
    """What a request has that went through a caller's own slot map, straight to a shard. Routers refuse it."""

    position: Position = 0
    """Where in its sequence the stretch begins that is sent; other positions count from there."""
    epoch: Annotated[int, Meta(ge=0, le=limits.SEQ_MAX)] | None = None
    """Of the slot map by which the stretch was cut; required when `position` is not 0."""
    number: Annotated[int, Meta(ge=0, le=limits.SEQ_MAX)] = 0
    """Of the last change without a key that the caller knows: a shard that knows less catches up before it answers."""


class MatchRequest(Placed, kw_only=True, tag_field="op", tag="match"):
    """Which is the longest prefix of these blocks that somebody holds, and who?"""

    namespace: Name
    block_ids: BlockIds | None = None
    token_ids: TokenIds | None = None
    """Instead of block_ids, where the namespace's profile makes IDs of tokens."""
    detail: Literal["none", "workers", "blocks"] = "workers"
    tiers: list[TierName] | None = None
    """Whose locations count; None: all."""
    workers: Annotated[list[WorkerName], Meta(max_length=limits.WORKERS_LISTED_MAX)] | None = None
    """Whose locations count; None: everybody's."""
    max_workers: Annotated[int, Meta(ge=1, le=limits.WORKERS_MAX)] | None = None
    deadline_ms: Milliseconds = limits.MATCH_DEADLINE_MS


class Part(Request, kw_only=True):
    """A further stretch of a change's sequence that the same shard owns."""

    position: Position
    block_ids: bytes
    first: Position = 0
    last: Position | None = None


class Change(Placed, kw_only=True):
    """What insert and remove have in common."""

    namespace: Name
    block_ids: BlockIds | None = None
    token_ids: TokenIds | None = None
    worker: Name
    dp_rank: Rank = 0
    generation: Generation = 0
    """Of the worker's cache."""
    first: Position = 0
    """The change begins at this position of the sequence."""
    seq: Annotated[int, Meta(ge=0, le=limits.SEQ_MAX)] | None = None
    """Number of this change among the worker's: the same or a lower one again is not applied again."""
    durable: bool = True
    deadline_ms: Milliseconds = limits.INSERT_DEADLINE_MS
    more: Annotated[list[Part], Meta(max_length=limits.STRETCHES_MAX)] = []
    """From a router to a shard: the change is in all of these or, should it not be answered, in some."""


class InsertRequest(Change, kw_only=True, tag_field="op", tag="insert"):
    """The worker newly holds the blocks from position `first` to the end of the sequence."""

    tier: TierName = "gpu"
    offset: Position = 0
    """Position of the first block sent: 0, or a multiple of 64 at least 64 before `first`."""
    root: Annotated[bytes, Meta(min_length=8, max_length=8)] | int | None = None
    """With an offset: the sequence's first block ID, which places it."""
    handle: int | None = None
    """Kept, and given back with the blocks."""


class RemoveRequest(Change, kw_only=True, tag_field="op", tag="remove"):
    """The worker no longer holds positions [first, last)."""

    tier: TierName | None = None
    """None: on any."""
    last: Position | None = None
    """None: to the end of the sequence."""


BatchItem: TypeAlias = MatchRequest | InsertRequest | RemoveRequest


class BatchRequest(Request, kw_only=True):
    """Several at once: in order for one shard, in no order across shards, each with its own result."""

    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS_MAX)]


class WorkerMatch(Reply, kw_only=True):
    """Blocks of the longest prefix that a worker holds, by tier; each counts the faster ones, too."""

    worker: str
    dp_rank: int
    gpu: int
    cpu: int
    ssd: int
    remote: int


class Location(Reply, kw_only=True, omit_defaults=True):
    """One place that holds a block."""

    worker: str
    dp_rank: int
    tier: TierName
    handle: int | None = None


class MatchReply(Reply, kw_only=True, omit_defaults=True):
    """The longest prefix of which each block has a live location under the request's filters."""

    matched_blocks: int
    matched_tokens: int
    workers: list[WorkerMatch]
    """The longest first, then by name."""
    truncated: bool
    complete: bool
    """Every owner answered, so this is all there is; else `degraded` says why it may not be."""
    degraded: list[Reason]
    epoch: int
    blocks: list[list[Location]] | None = None


class InsertReply(Reply, kw_only=True):
    """The change is in the index."""

    applied: bool
    """False: its seq says that it was before."""
    durable: bool
    """True: on the disk. False, by the caller's choice: it will be, soon."""
    blocks_added: int
    epoch: int


class RemoveReply(Reply, kw_only=True):
    """The change is in the index."""

    applied: bool = True
    """False: its seq says that it was before."""
    segments_changed: int
    durable: bool
    epoch: int


class BatchReply(Reply, kw_only=True):
    """One result for each item, in their order: its reply, or an ErrorReply."""

    results: list[Raw]


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What went wrong. `code` is stable; `message` is for people."""

    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None
    outcome: Outcome | None = None
    """Of a change that failed."""
    epoch: int | None = None
    """Of the slot map of a shard that says wrong_shard."""
    missing: list[str] | None = None
    """Shards that do not have a change without a key yet."""


class ErrorReply(Reply, kw_only=True):
    """The reply to a request that failed."""

    error: ErrorBody


# --- namespaces, workers, tenants -------------------------------------------------------------------------------------


class NamespaceRequest(Request, kw_only=True):
    """Create a namespace; the same again is the same."""

    model: Name
    lora: OptionalName = ""
    salt: OptionalName = ""
    block_size: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)] = 16
    hash_profile: HashProfile = HashProfile.XXH3

    def spec(self, tenant: str) -> NamespaceSpec:
        """What it says, for a tenant."""
        return NamespaceSpec(
            tenant=tenant,
            model=self.model,
            lora=self.lora,
            salt=self.salt,
            block_size=self.block_size,
            hash_profile=self.hash_profile,
        )


class NamespaceReply(Reply, kw_only=True):
    """A namespace."""

    namespace: str
    """Its id, by which requests name it."""
    model: str
    lora: str
    salt: str
    block_size: int
    hash_profile: HashProfile
    key: bytes | None = None
    """Of its internal block IDs, for a caller that places its requests itself."""


class NamespaceList(Reply, kw_only=True):
    """The namespaces of the caller's tenant."""

    namespaces: list[NamespaceReply]


class RegisterRequest(WorkerName, kw_only=True):
    """Register a worker: it belongs to the caller's credential. The same again is fine."""

    heartbeat_ttl_ms: Annotated[int, Meta(ge=0, le=limits.DEADLINE_MS_MAX)] = 0
    """Leave it out of answers when it is silent for longer; 0: it sends no heartbeats."""


class HeartbeatRequest(Request, kw_only=True):
    """These workers are there."""

    workers: Annotated[list[WorkerName], Meta(min_length=1, max_length=limits.WORKERS_LISTED_MAX)]


class ClearRequest(WorkerName, kw_only=True):
    """The worker's cache is empty: all it held is gone."""

    generation: Generation | None = None
    """The one that begins now; None: the next."""


class WorkerReply(Reply, kw_only=True):
    """A worker."""

    worker: str
    dp_rank: int
    generation: int
    heartbeat_ttl_ms: int
    state: WorkerState


class WorkerList(Reply, kw_only=True):
    """The workers of the caller's credential, or all for an admin."""

    workers: list[WorkerReply]


class PurgeReply(Reply, kw_only=True):
    """The tenant's blocks are gone."""

    tenant: str
    purges: int


class Done(Reply, kw_only=True):
    """It was done."""

    done: bool = True


class Empty(Request, kw_only=True):
    """A request without fields."""


# --- the cluster ------------------------------------------------------------------------------------------------------

ShardState: TypeAlias = Literal["joining", "recovering", "serving", "draining", "suspect", "down"]


class ShardStatus(Reply, kw_only=True):
    """A shard as the coordinator sees it."""

    shard: str
    state: ShardState
    http: str
    stream: str
    incarnation: str
    slots: int
    epoch: int
    number: int
    blocks: int
    segments: int
    resident_bytes: int
    disk_bytes: int
    lease_left_s: float
    snapshot_age_s: float
    log_bytes: int
    """Behind its last snapshot."""
    recovery_s: float
    """What its last recovery took."""


class RouterStatus(Reply, kw_only=True):
    """A router as the coordinator sees it."""

    router: str
    http: str
    epoch: int
    seen_s: float
    """Seconds since it was heard."""


class ClusterReply(Reply, kw_only=True):
    """The cluster as the coordinator sees it."""

    cluster: str
    coordinator: str
    leading: bool
    epoch: int
    number: int
    splits: int
    shards: list[ShardStatus]
    routers: list[RouterStatus]


class SlotsReply(Reply, kw_only=True):
    """The slot map, and where its shards are."""

    epoch: int
    nonce: bytes
    number: int
    """Of the last change without a key."""
    shards: list[str]
    owners: bytes
    """4,096 times a u16 little-endian: the slot's owner as an index into `shards`."""
    splits: dict[int, int]
    addresses: dict[str, dict[str, str]]
    """Shard -> {"http": "host:port", "stream": "host:port"}."""


class EventsRequest(Request, kw_only=True):
    """What happened, from a number on."""

    after: Annotated[int, Meta(ge=0, le=limits.SEQ_MAX)] = 0
    limit: Annotated[int, Meta(ge=1, le=limits.EVENTS_KEPT)] = 256


class EventList(Reply, kw_only=True):
    """What happened, oldest first."""

    events: list[Event]
