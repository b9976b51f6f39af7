"""The schema between nodes, on the stream only: leases, views, changes without a key (design §6 and §7)."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from sarp_cluster import limits
from sarp_cluster.cluster.registry import Entry
from sarp_cluster.cluster.slot_map import PackedSlotMap
from sarp_cluster.wire.messages import Name, OptionalName, Reply, Request, ShardState, WorkerName

PROTOCOL_VERSION = 1
NodeState: TypeAlias = Literal["recovering", "serving", "draining"]
"""What a shard says of itself."""


class Hello(Request, kw_only=True):
    """The first frame of a connection."""

    version: int
    """Of the protocol: the highest the caller speaks."""
    features: tuple[str, ...] = ()
    cluster: OptionalName = ""
    """Id of the cluster it means; empty: whichever this is."""
    credential: OptionalName = ""
    """The bearer token; empty: none."""
    tenant: OptionalName = ""
    """For a credential with several."""
    node: OptionalName = ""
    """Name of the node that calls, if it is one."""


class Welcome(Reply, kw_only=True):
    """The answer to a Hello."""

    version: int
    """Of the protocol, spoken from now on: the lower of both."""
    features: tuple[str, ...]
    cluster: str
    node: str


class NodeAddress(Reply, kw_only=True):
    """Where a shard is."""

    shard: str
    incarnation: str
    http: str
    stream: str
    state: ShardState


class ShardHeartbeat(Request, kw_only=True):
    """A shard is there, and asks for its lease."""

    shard: Name
    store: Name
    """Identity of its directory."""
    incarnation: Name
    """Of its process."""
    pid: int
    http: OptionalName
    stream: Name
    state: NodeState
    epoch: int
    """Of its slot map; 0: it has none."""
    nonce: bytes
    number: int
    """Of the last change without a key that it has durably."""
    blocks: int
    segments: int
    resident_bytes: int
    disk_bytes: int
    log_bytes: int
    """Behind its last snapshot."""
    snapshot_age_s: float
    """Since its last snapshot, or since it started."""
    recovery_s: float
    """What its recovery took; 0 until it is done."""


class RouterHeartbeat(Request, kw_only=True):
    """A router is there."""

    router: Name
    http: OptionalName
    epoch: int
    number: int


class HeartbeatReply(Reply, kw_only=True):
    """What whoever sent a heartbeat needs to know."""

    lease_ms: int
    """Granted from when the heartbeat was sent; 0: none."""
    epoch: int
    number: int
    nodes: list[NodeAddress]
    leading: bool
    """False: this coordinator does not lead; another has to be asked."""


class FetchRequest(Request, kw_only=True):
    """What is newer than this? Coordinators and shards answer."""

    epoch: int
    nonce: bytes = b""
    number: int


class View(Reply, kw_only=True):
    """A slot map, if it is newer than asked for, and the entries of the registry above a number."""

    cluster: str
    slot_map: PackedSlotMap | None
    number: int
    entries: list[Entry]
    nodes: list[NodeAddress]


class InstallRequest(Request, kw_only=True):
    """Take this over durably: from the coordinator to a node."""

    slot_map: PackedSlotMap | None
    number: int
    """Of the registry after these entries."""
    above: int
    """The entries are all there are above this number."""
    entries: list[Entry]
    nodes: list[NodeAddress]


class InstallReply(Reply, kw_only=True):
    """What the node has now, durably."""

    epoch: int
    nonce: bytes
    number: int


class ProbeRequest(Request, kw_only=True):
    """Are you well?"""


class ProbeReply(Reply, kw_only=True):
    """What the node says of itself."""

    node: str
    incarnation: str
    state: NodeState
    epoch: int
    number: int


class HeardRequest(Request, kw_only=True):
    """Workers whose heartbeats a router heard within the last interval."""

    workers: Annotated[list[WorkerName], Meta(max_length=limits.WORKERS_LISTED_MAX)]


class NewNamespace(Request, kw_only=True, tag_field="change", tag="namespace"):
    """A namespace is to be there."""

    id: Name
    tenant: Name
    model: Name
    lora: OptionalName
    salt: OptionalName
    block_size: int
    hash_profile: str


class NewWorker(Request, kw_only=True, tag_field="change", tag="register"):
    """A worker is to be there, and belong to a credential."""

    worker: WorkerName
    owner: OptionalName
    heartbeat_ttl_ms: int


class ClearWorker(Request, kw_only=True, tag_field="change", tag="clear"):
    """A worker's cache is empty."""

    worker: WorkerName
    generation: int | None


class RetireWorker(Request, kw_only=True, tag_field="change", tag="retire"):
    """A worker drains, or is gone."""

    worker: WorkerName
    gone: bool


class PurgeTenant(Request, kw_only=True, tag_field="change", tag="purge"):
    """A tenant's blocks are to be gone."""

    tenant: Name


KeylessChange: TypeAlias = NewNamespace | NewWorker | ClearWorker | RetireWorker | PurgeTenant


class ChangeRequest(Request, kw_only=True):
    """A change without a key, for the coordinator to number and to spread."""

    change: KeylessChange


class ChangeReply(Reply, kw_only=True):
    """Every serving shard has it durably."""

    entry: Entry


class ShardCommand(Request, kw_only=True):
    """Snapshot, recover or drain one shard."""

    shard: Name
