"""Cut into stretches, sent to shards and joined again, an answer is that of one index with everything (design §7)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker
from sarp_cluster.wire import messages, planning

SPEC = NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE)
KEY = NamespaceKey(derive_namespace_key(bytes(32), SPEC))
WORKERS = ("a", "b", "c")
Detail: TypeAlias = Literal["none", "workers", "blocks"]
DETAILS: tuple[Detail, ...] = ("none", "workers", "blocks")
TIERS: tuple[messages.TierName, ...] = messages.TIER_NAMES
SHARDS = ("s0", "s1", "s2")

# Few tokens, so that sequences share prefixes; long enough to be cut twice.
bodies = st.lists(st.integers(0, 1), min_size=1, max_size=5)
sequences = st.builds(
    lambda root, parts: chained_block_ids([root, *(token for part in parts for token in [part] * 40)]),
    st.integers(0, 1),
    bodies,
)


@st.composite
def changes(draw: st.DrawFn) -> messages.InsertRequest | messages.RemoveRequest:
    ids = draw(sequences)
    count = len(ids) // 8
    worker, tier = draw(st.sampled_from(WORKERS)), draw(st.sampled_from(TIERS))
    first = draw(st.integers(0, count - 1)) if draw(st.booleans()) else 0
    if draw(st.integers(0, 3)):
        handle = draw(st.none() | st.integers(0, 9))
        return messages.InsertRequest(
            namespace="n", block_ids=ids, worker=worker, tier=tier, first=first, handle=handle
        )
    last = draw(st.integers(first + 1, count))
    anywhere = draw(st.booleans())
    return messages.RemoveRequest(
        namespace="n", block_ids=ids, worker=worker, tier=None if anywhere else tier, first=first, last=last
    )


@st.composite
def maps(draw: st.DrawFn) -> SlotMap:
    splits: dict[int, int] = {}
    for ids in draw(st.lists(sequences, max_size=3)):
        for start in (0, 64, 128):
            if start + 64 < len(ids) // 8 and draw(st.booleans()):
                splits[KEY.internal_id(ids, start)] = start + 64
    return SlotMap.first(SHARDS, bytes(NONCE_BYTES), splits)


class Split:
    """A reference index for each shard, asked as a router asks."""

    def __init__(self, slot_map: SlotMap) -> None:
        self.map = slot_map
        self.shards = {name: ReferenceIndex() for name in SHARDS}
        self.namespaces = {name: index.create_namespace(SPEC) for name, index in self.shards.items()}

    def change(self, request: messages.InsertRequest | messages.RemoveRequest) -> None:
        ids = request.block_ids
        assert isinstance(ids, bytes)
        for piece in planning.plan_change(request, ids, KEY, self.map, number=0, deadline_ms=100):
            sent = piece.request
            assert isinstance(sent.block_ids, bytes)
            last = sent.last if isinstance(sent, messages.RemoveRequest) else None
            main = messages.Part(position=sent.position, block_ids=sent.block_ids, first=sent.first, last=last)
            for part in (*sent.more, main):
                apply(self.shards[piece.shard], self.namespaces[piece.shard], sent, part)

    def match(self, request: messages.MatchRequest, ids: bytes) -> messages.MatchReply:
        pieces = planning.plan_match(ids, KEY, self.map)
        answers: list[messages.MatchReply | messages.Reason] = []
        for piece in pieces:
            shard = piece.stretch.shard
            sent = planning.match_request(
                request, piece, epoch=self.map.epoch, number=0, deadline_ms=100, alone=len(pieces) == 1
            )
            found = self.shards[shard].match(
                self.namespaces[shard],
                piece.block_ids,
                detail=sent.detail,
                tiers=tiers_of(sent.tiers),
                max_workers=sent.max_workers,
            )
            answers.append(reply(found))
        return planning.join_matches(request, pieces, answers, 16, self.map.epoch)


def tiers_of(names: Sequence[messages.TierName] | None) -> list[Tier] | None:
    return None if names is None else [Tier[name.upper()] for name in names]


def apply(
    index: ReferenceIndex,
    namespace: object,
    request: messages.InsertRequest | messages.RemoveRequest,
    part: messages.Part,
) -> None:
    worker = Worker(request.worker)
    if isinstance(request, messages.InsertRequest):
        tier = Tier[request.tier.upper()]
        index.insert(namespace, part.block_ids, worker=worker, tier=tier, first=part.first, handle=request.handle)  # type: ignore[arg-type]
    else:
        where = None if request.tier is None else Tier[request.tier.upper()]
        index.remove(namespace, part.block_ids, worker=worker, tier=where, first=part.first, last=part.last)  # type: ignore[arg-type]


def reply(answer: Answer) -> messages.MatchReply:
    workers = [
        messages.WorkerMatch(worker=w.instance_id, dp_rank=w.dp_rank, gpu=w.gpu, cpu=w.cpu, ssd=w.ssd, remote=w.remote)
        for w in answer.workers
    ]
    blocks = None
    if answer.blocks is not None:
        blocks = [
            [
                messages.Location(worker=worker.instance_id, dp_rank=worker.dp_rank, tier=TIERS[tier], handle=handle)
                for worker, tier, handle in block
            ]
            for block in answer.blocks
        ]
    return messages.MatchReply(
        matched_blocks=answer.matched_blocks,
        matched_tokens=answer.matched_blocks * 16,
        workers=workers,
        truncated=answer.truncated,
        complete=True,
        degraded=[],
        epoch=1,
        blocks=blocks,
    )


@settings(max_examples=500)
@given(
    maps(),
    st.lists(changes(), max_size=12),
    st.lists(sequences, min_size=1, max_size=4),
    st.sampled_from(DETAILS),
    st.none() | st.lists(st.sampled_from(TIERS), min_size=1, unique=True),
    st.none() | st.integers(1, 2),
)
def test_a_joined_answer_is_that_of_one_index(
    slot_map: SlotMap,
    made: list[messages.InsertRequest | messages.RemoveRequest],
    queries: list[bytes],
    detail: Detail,
    tiers: list[messages.TierName] | None,
    max_workers: int | None,
) -> None:
    split, whole = Split(slot_map), ReferenceIndex()
    namespace = whole.create_namespace(SPEC)
    for change in made:
        split.change(change)
        assert isinstance(change.block_ids, bytes)
        last = change.last if isinstance(change, messages.RemoveRequest) else None
        everything = messages.Part(position=0, block_ids=change.block_ids, first=change.first, last=last)
        apply(whole, namespace, change, everything)
    for ids in queries:
        request = messages.MatchRequest(
            namespace="n",
            block_ids=ids,
            detail=detail,
            tiers=tiers,
            max_workers=max_workers,
        )
        found = whole.match(namespace, ids, detail=detail, tiers=tiers_of(tiers), max_workers=max_workers)
        assert split.match(request, ids) == reply(found), struct.unpack(f"<{len(ids) // 8}Q", ids)[:4]
