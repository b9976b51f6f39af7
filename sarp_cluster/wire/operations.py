"""The operations: name, messages, scope, and route on the HTTP wire. One table for both wires and for clients."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from sarp_cluster import limits
from sarp_cluster.wire import control, messages

Scope: TypeAlias = Literal["match", "insert", "admin", "node"]
SCOPES: Final[tuple[Scope, ...]] = ("match", "insert", "admin", "node")


class Operation(NamedTuple):
    """One thing that can be asked of a node."""

    name: str
    """On the stream."""
    request: type[messages.Request]
    reply: type[messages.Reply]
    scope: Scope | None
    """What a credential needs; None: the operation itself looks (a batch at its items)."""
    method: str = ""
    path: str = ""
    """On the HTTP wire; `{name}` is a field of the request. Empty: on the stream only."""
    change: bool = False
    """It changes the index, so that an error has to say what is known of the outcome."""
    body_bytes_max: int = limits.BODY_BYTES_MAX


_ALL: Final = (
    Operation("match", messages.MatchRequest, messages.MatchReply, "match", "POST", "/v1/match"),
    Operation("insert", messages.InsertRequest, messages.InsertReply, "insert", "POST", "/v1/insert", change=True),
    Operation("remove", messages.RemoveRequest, messages.RemoveReply, "insert", "POST", "/v1/remove", change=True),
    Operation(
        "batch",
        messages.BatchRequest,
        messages.BatchReply,
        None,
        "POST",
        "/v1/batch",
        change=True,
        body_bytes_max=limits.BATCH_BYTES_MAX,
    ),
    Operation(
        "create_namespace",
        messages.NamespaceRequest,
        messages.NamespaceReply,
        "insert",
        "POST",
        "/v1/namespaces",
        change=True,
    ),
    Operation("list_namespaces", messages.Empty, messages.NamespaceList, "match", "GET", "/v1/namespaces"),
    Operation(
        "register_worker",
        messages.RegisterRequest,
        messages.WorkerReply,
        "insert",
        "POST",
        "/v1/workers/register",
        change=True,
    ),
    Operation("heartbeat", messages.HeartbeatRequest, messages.Done, "insert", "POST", "/v1/workers/heartbeat"),
    Operation(
        "clear_worker",
        messages.ClearRequest,
        messages.WorkerReply,
        "insert",
        "POST",
        "/v1/workers/clear",
        change=True,
    ),
    Operation(
        "drain_worker",
        messages.WorkerName,
        messages.WorkerReply,
        "insert",
        "POST",
        "/v1/workers/drain",
        change=True,
    ),
    Operation(
        "deregister_worker",
        messages.WorkerName,
        messages.WorkerReply,
        "insert",
        "POST",
        "/v1/workers/deregister",
        change=True,
    ),
    Operation("list_workers", messages.Empty, messages.WorkerList, "match", "GET", "/v1/workers"),
    Operation(
        "purge_tenant",
        control.PurgeTenant,
        messages.PurgeReply,
        "admin",
        "POST",
        "/v1/tenants/{tenant}/purge",
        change=True,
    ),
    Operation("cluster", messages.Empty, messages.ClusterReply, "admin", "GET", "/v1/cluster"),
    Operation("slots", messages.Empty, messages.SlotsReply, "match", "GET", "/v1/slots"),
    Operation("events", messages.EventsRequest, messages.EventList, "admin", "GET", "/v1/events"),
    Operation("snapshot_shard", control.ShardCommand, messages.Done, "admin", "POST", "/v1/shards/{shard}/snapshot"),
    Operation("recover_shard", control.ShardCommand, messages.Done, "admin", "POST", "/v1/shards/{shard}/recover"),
    Operation("drain_shard", control.ShardCommand, messages.Done, "admin", "POST", "/v1/shards/{shard}/drain"),
    # Between nodes.
    Operation("shard_heartbeat", control.ShardHeartbeat, control.HeartbeatReply, "node"),
    Operation("router_heartbeat", control.RouterHeartbeat, control.HeartbeatReply, "node"),
    Operation("fetch", control.FetchRequest, control.View, "node"),
    Operation("install", control.InstallRequest, control.InstallReply, "node"),
    Operation("probe", control.ProbeRequest, control.ProbeReply, "node"),
    Operation("heard", control.HeardRequest, messages.Done, "node"),
    Operation("change", control.ChangeRequest, control.ChangeReply, "node", change=True),
)

OPERATIONS: Final = {operation.name: operation for operation in _ALL}
