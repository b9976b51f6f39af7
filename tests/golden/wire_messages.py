"""One message of each kind, as it is sent: what wire-v1 has a file of.

`python -m tests.golden.wire_messages` writes them anew. Do that only where docs/protocol.md allows: a field that is new
has a default and is left out while it has it, so that files of older programs stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from sarp_cluster.cluster.registry import NamespaceEntry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.types import Event, HashProfile, NamespaceSpec
from sarp_cluster.wire import control, frames, messages
from sarp_cluster.wire.codec import encode

GOLDEN: Final = Path(__file__).parent / "wire-v1"
IDS: Final = bytes(range(24))
SPEC: Final = NamespaceSpec(tenant="Zürich", model="m", lora="l", salt="s", hash_profile=HashProfile.OPAQUE)
SLOT_MAP: Final = SlotMap.first(["s1", "s0"], bytes(range(16)), {2**64 - 1: 128})
WORKER: Final = messages.WorkerName(worker="gpu-1", dp_rank=3)
NODE: Final = control.NodeAddress(
    shard="s0", incarnation="process", http="127.0.0.1:7101", stream="[::1]:7201", state="serving"
)
MATCH: Final = messages.MatchRequest(
    namespace="0123456789abcdef",
    block_ids=IDS,
    detail="blocks",
    tiers=["gpu", "remote"],
    workers=[WORKER],
    max_workers=7,
    deadline_ms=40,
)
INSERT: Final = messages.InsertRequest(
    namespace="0123456789abcdef",
    block_ids=IDS,
    worker="gpu-1",
    dp_rank=3,
    generation=2**32 - 1,
    first=66,
    seq=2**63 - 1,
    durable=False,
    deadline_ms=1_000,
    tier="cpu",
    offset=64,
    root=bytes(8),
    handle=2**64 - 1,
)
REMOVE: Final = messages.RemoveRequest(
    namespace="0123456789abcdef",
    token_ids=[0, 2**32 - 1],
    worker="gpu-1",
    first=1,
    last=2,
    tier="ssd",
    position=64,
    epoch=5,
    more=[messages.Part(position=128, block_ids=IDS, first=1, last=3)],
)
MATCHED: Final = messages.MatchReply(
    matched_blocks=2,
    matched_tokens=32,
    workers=[messages.WorkerMatch(worker="gpu-1", dp_rank=3, gpu=1, cpu=2, ssd=2, remote=2)],
    truncated=True,
    complete=False,
    degraded=["shard_down"],
    epoch=5,
    blocks=[
        [messages.Location(worker="gpu-1", dp_rank=3, tier="gpu", handle=7)],
        [messages.Location(worker="gpu-1", dp_rank=3, tier="cpu")],
    ],
)
ERROR: Final = messages.ErrorReply(
    error=messages.ErrorBody(
        code="wrong_shard",
        message="block_ids: they belong to s1",
        field="block_ids",
        retry_after_ms=200,
        outcome="not_applied",
        epoch=6,
        missing=["s1"],
    )
)
NAMESPACE: Final = messages.NamespaceReply(
    namespace="0123456789abcdef",
    model="m",
    lora="l",
    salt="s",
    block_size=16,
    hash_profile=HashProfile.OPAQUE,
    key=bytes(48),
)
WORKER_REPLY: Final = messages.WorkerReply(
    worker="gpu-1", dp_rank=3, generation=1, heartbeat_ttl_ms=5_000, state="draining"
)
STATUS: Final = messages.ShardStatus(
    shard="s0",
    state="serving",
    http="127.0.0.1:7101",
    stream="127.0.0.1:7201",
    incarnation="process",
    slots=2_048,
    epoch=5,
    number=9,
    blocks=10**9,
    segments=17_000_000,
    resident_bytes=1_100_000_000,
    disk_bytes=10**11,
    lease_left_s=54.5,
    snapshot_age_s=12.25,
    log_bytes=33_554_432,
    recovery_s=0.0625,
)

MESSAGES: Final[dict[str, Any]] = {
    "match": MATCH,
    "match-least": messages.MatchRequest(namespace="n", token_ids=bytes(4)),
    "match-reply": MATCHED,
    "insert": INSERT,
    "insert-reply": messages.InsertReply(applied=True, durable=True, blocks_added=3, epoch=5),
    "remove": REMOVE,
    "remove-reply": messages.RemoveReply(segments_changed=1, durable=True, epoch=5),
    "batch": messages.BatchRequest(items=[MATCH, INSERT, REMOVE]),
    "batch-reply": messages.BatchReply(results=[msgspec.Raw(encode(MATCHED)), msgspec.Raw(encode(ERROR))]),
    "error-reply": ERROR,
    "namespace": messages.NamespaceRequest(
        model="m", lora="l", salt="s", block_size=32, hash_profile=HashProfile.OPAQUE
    ),
    "namespace-reply": NAMESPACE,
    "namespace-list": messages.NamespaceList(namespaces=[NAMESPACE]),
    "register": messages.RegisterRequest(worker="gpu-1", dp_rank=3, heartbeat_ttl_ms=5_000),
    "worker-name": WORKER,
    "heartbeat": messages.HeartbeatRequest(workers=[WORKER]),
    "clear": messages.ClearRequest(worker="gpu-1", dp_rank=3, generation=7),
    "worker-reply": WORKER_REPLY,
    "worker-list": messages.WorkerList(workers=[WORKER_REPLY]),
    "purge": control.PurgeTenant(tenant="Zürich"),
    "purge-reply": messages.PurgeReply(tenant="Zürich", purges=2),
    "done": messages.Done(),
    "empty": messages.Empty(),
    "cluster-reply": messages.ClusterReply(
        cluster="c",
        coordinator="coordinator-0",
        leading=True,
        epoch=5,
        number=9,
        splits=1,
        shards=[STATUS],
        routers=[messages.RouterStatus(router="router-0", http="127.0.0.1:7100", epoch=5, seen_s=0.5)],
    ),
    "slots-reply": messages.SlotsReply(
        epoch=1,
        nonce=SLOT_MAP.nonce,
        number=9,
        shards=list(SLOT_MAP.shards),
        owners=SLOT_MAP.packed().owners,
        splits=dict(SLOT_MAP.splits),
        addresses={"s0": {"http": "127.0.0.1:7101", "stream": "127.0.0.1:7201"}},
    ),
    "events": messages.EventsRequest(after=7, limit=8),
    "event-list": messages.EventList(
        events=[Event(number=8, time=1.5, node="s0", kind="state", text="suspect -> down: three probes")]
    ),
    "shard-command": control.ShardCommand(shard="s0"),
    "hello": control.Hello(version=1, cluster="c", credential="sarp_token", tenant="Zürich", node="router-0"),
    "welcome": control.Welcome(version=1, features=(), cluster="c", node="s0"),
    "shard-heartbeat": control.ShardHeartbeat(
        shard="s0",
        store="directory",
        incarnation="process",
        pid=4_242,
        http="127.0.0.1:7101",
        stream="127.0.0.1:7201",
        state="serving",
        epoch=5,
        nonce=bytes(range(16)),
        number=9,
        blocks=1,
        segments=2,
        resident_bytes=3,
        disk_bytes=4,
        log_bytes=5,
        snapshot_age_s=6.5,
        recovery_s=0.25,
    ),
    "router-heartbeat": control.RouterHeartbeat(router="router-0", http="127.0.0.1:7100", epoch=5, number=9),
    "heartbeat-reply": control.HeartbeatReply(lease_ms=60_000, epoch=5, number=9, nodes=[NODE], leading=True),
    "fetch": control.FetchRequest(epoch=4, nonce=bytes(range(16)), number=8),
    "view": control.View(
        cluster="c",
        slot_map=SLOT_MAP.packed(),
        number=9,
        entries=[
            NamespaceEntry(1, "0123456789abcdef", SPEC),
            WorkerEntry(3, "gpu-1", 3, "credential", 2, 5_000, True, False),
            TenantEntry(4, "Zürich", 1),
        ],
        nodes=[NODE],
    ),
    "install": control.InstallRequest(slot_map=None, number=9, above=8, entries=[], nodes=[NODE]),
    "install-reply": control.InstallReply(epoch=5, nonce=bytes(range(16)), number=9),
    "probe": control.ProbeRequest(),
    "probe-reply": control.ProbeReply(node="s0", incarnation="process", state="serving", epoch=5, number=9),
    "heard": control.HeardRequest(workers=[WORKER]),
    "change-namespace": control.ChangeRequest(
        change=control.NewNamespace(id="n", tenant="t", model="m", lora="", salt="", block_size=16, hash_profile="xxh3")
    ),
    "change-register": control.ChangeRequest(
        change=control.NewWorker(worker=WORKER, owner="credential", heartbeat_ttl_ms=0)
    ),
    "change-clear": control.ChangeRequest(change=control.ClearWorker(worker=WORKER, generation=None)),
    "change-retire": control.ChangeRequest(change=control.RetireWorker(worker=WORKER, gone=True)),
    "change-purge": control.ChangeRequest(change=control.PurgeTenant(tenant="Zürich")),
    "change-reply": control.ChangeReply(entry=TenantEntry(4, "Zürich", 1)),
}
FRAMES: Final[dict[str, tuple[int, str | bool, msgspec.Struct]]] = {
    "frame-least": (1, "match", messages.MatchRequest(namespace="n", block_ids=IDS[:16])),
    "frame-least-reply": (
        1,
        True,
        messages.MatchReply(
            matched_blocks=0, matched_tokens=0, workers=[], truncated=False, complete=True, degraded=[], epoch=5
        ),
    ),
    "frame-request": (7, "match", MATCH),
    "frame-reply": (7, True, MATCHED),
    "frame-error": (2**32 - 1, False, ERROR),
}


def write_files() -> dict[str, bytes]:
    """Name -> bytes of the file."""
    files = {name: encode(message) for name, message in MESSAGES.items()}
    return files | {name: frames.pack(*frame) for name, frame in FRAMES.items()}


def main() -> None:
    """Write the golden files anew."""
    GOLDEN.mkdir(exist_ok=True)
    for name, data in write_files().items():
        (GOLDEN / name).write_bytes(data)


if __name__ == "__main__":
    main()
