"""From a request to what each shard is asked, and from their answers to one (design §7). Pure.

Nothing is replicated and nothing has to be kept in step: each stretch has one owner, and the joined answer equals that
of one index that holds everything. Routers plan so, and clients that ask shards themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from sarp_cluster.cluster.placement import ID_BYTES, Stretch, slot_of, stretches
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.errors import BadRequestError, UnknownPrefixError
from sarp_cluster.wire import messages
from sarp_cluster.wire.block_input import root_of
from sarp_cluster.wire.faults import RemoteError

REASONS: Final[dict[str, messages.Reason]] = {
    "recovering": "recovering",
    "overloaded": "overload",
    "wrong_shard": "stale_map",
    "unknown_namespace": "stale_map",
    "quarantined": "quarantined",
}
"""What an error of a shard means for a match. Others are of the caller (4xx), or make the shard count as down."""


class MatchPiece(NamedTuple):
    """What one owner is asked for a match: one stretch."""

    stretch: Stretch
    block_ids: bytes


class ChangePiece(NamedTuple):
    """What one shard is asked for a change: all its stretches at once, so that its seq covers them all."""

    shard: str
    request: messages.InsertRequest | messages.RemoveRequest


def plan_match(block_ids: bytes, key: NamespaceKey, slot_map: SlotMap) -> list[MatchPiece]:
    """The stretches of a query, in order; none for an empty one."""
    return [
        MatchPiece(one, block_ids[one.start * ID_BYTES : one.end * ID_BYTES])
        for one in stretches(block_ids, key, slot_map)
    ]


def match_request(
    request: messages.MatchRequest, piece: MatchPiece, *, epoch: int, number: int, deadline_ms: int, alone: bool
) -> messages.MatchRequest:
    """What is sent for a stretch: by which map it was cut, and which change without a key is known. The list of workers
    is cut after the answers are joined."""
    return replace(
        request,
        block_ids=piece.block_ids,
        token_ids=None,
        position=piece.stretch.start,
        epoch=epoch,
        number=number,
        detail=request.detail if alone or request.detail == "blocks" else "workers",
        max_workers=request.max_workers if alone else None,
        deadline_ms=deadline_ms,
    )


def join_matches(
    request: messages.MatchRequest,
    pieces: Sequence[MatchPiece],
    answers: Sequence[messages.MatchReply | messages.Reason],
    block_size: int,
    epoch: int,
) -> messages.MatchReply:
    """One answer of those of the stretches; a Reason stands for one that did not come.

    A stretch counts as far as each before it is matched, and held, to its end. So what lies behind the first that ends
    early changes nothing, whether its owner answered or not.
    """
    matched = 0
    holders: dict[tuple[str, int], list[int]] = {}
    blocks: list[list[messages.Location]] = []
    degraded: list[messages.Reason] = []
    truncated = False
    for piece, answer in zip(pieces, answers, strict=True):
        start, end = piece.stretch.start, piece.stretch.end
        if isinstance(answer, str):
            degraded.append(answer)
            break
        degraded += [reason for reason in answer.degraded if reason not in degraded]
        truncated = truncated or answer.truncated
        for one in answer.workers:
            name = (one.worker, one.dp_rank)
            reach = holders.setdefault(name, [0, 0, 0, 0]) if start == 0 else holders.get(name)
            if reach is not None:
                for tier, further in enumerate((one.gpu, one.cpu, one.ssd, one.remote)):
                    if reach[tier] == start:
                        reach[tier] = start + further
        blocks += answer.blocks or ()
        matched = start + answer.matched_blocks
        if matched < end or not answer.complete:
            break
    workers = [
        messages.WorkerMatch(worker=name, dp_rank=rank, gpu=reach[0], cpu=reach[1], ssd=reach[2], remote=reach[3])
        for (name, rank), reach in holders.items()
        if reach[3]
    ]
    workers.sort(key=lambda one: (-one.remote, one.worker, one.dp_rank))
    if request.detail == "none":
        workers = []
    if request.max_workers is not None and len(workers) > request.max_workers:
        del workers[request.max_workers :]
        truncated = True
    return messages.MatchReply(
        matched_blocks=matched,
        matched_tokens=matched * block_size,
        workers=workers,
        truncated=truncated,
        complete=not degraded,
        degraded=degraded,
        epoch=epoch,
        blocks=blocks if request.detail == "blocks" else None,
    )


def nothing(reason: messages.Reason | None, epoch: int) -> messages.MatchReply:
    """The answer to a match of which nothing is known, or (None) of which there is nothing to know."""
    return messages.MatchReply(
        matched_blocks=0,
        matched_tokens=0,
        workers=[],
        truncated=False,
        complete=reason is None,
        degraded=[] if reason is None else [reason],
        epoch=epoch,
    )


def match_reason(error: messages.ErrorBody) -> messages.Reason:
    """Why a match that a shard refused is shorter. Raises RemoteError for what is the caller's fault."""
    reason = REASONS.get(error.code)
    if reason is not None:
        return reason
    if error.code in ("bad_request", "too_large", "unknown_worker"):
        raise RemoteError(error)
    return "shard_down"


def plan_change(
    request: messages.InsertRequest | messages.RemoveRequest,
    block_ids: bytes,
    key: NamespaceKey,
    slot_map: SlotMap,
    *,
    number: int,
    deadline_ms: int,
) -> list[ChangePiece]:
    """What each shard is asked for a change, in the order of its first stretch. `number`: as in `match_request`.

    Stretches that lie wholly before `first`, or behind `last`, are left out: nothing of them changes.
    """
    count = len(block_ids) // ID_BYTES
    # What all shards are told alike; each gets its own stretches.
    common = replace(
        request, token_ids=None, position=0, epoch=slot_map.epoch, number=number, deadline_ms=deadline_ms, more=[]
    )
    if isinstance(common, messages.InsertRequest):
        if common.offset:
            return [_plan_tail(common, block_ids, key, slot_map)]
        common.root = None
        last = count
    else:
        last = count if common.last is None else common.last
    if not 0 <= request.first < last or last > count:
        raise BadRequestError(
            f"first: {request.first} to {last} is not a range within the sequence's {count} blocks", field="first"
        )
    by_shard: dict[str, list[messages.Part]] = {}
    for one in stretches(block_ids, key, slot_map):
        if one.end <= request.first or one.start >= last:
            continue
        part = messages.Part(
            position=one.start,
            block_ids=block_ids[one.start * ID_BYTES : one.end * ID_BYTES],
            first=max(0, request.first - one.start),
            last=min(last, one.end) - one.start,
        )
        by_shard.setdefault(one.shard, []).append(part)
    return [ChangePiece(shard, _change_request(common, parts)) for shard, parts in by_shard.items()]


def _change_request(
    common: messages.InsertRequest | messages.RemoveRequest, parts: Sequence[messages.Part]
) -> messages.InsertRequest | messages.RemoveRequest:
    *more, main = parts
    sent = replace(common, block_ids=main.block_ids, position=main.position, first=main.first, more=more)
    if isinstance(sent, messages.RemoveRequest):
        sent.last = main.last
    return sent


def _plan_tail(common: messages.InsertRequest, block_ids: bytes, key: NamespaceKey, slot_map: SlotMap) -> ChangePiece:
    """An insert from an offset: placed by its root. Where its sequence is cut, only the whole of it can be placed."""
    root = root_of(common.root)
    if root is None:
        raise BadRequestError("root: an insert from an offset needs the first block's ID", field="root")
    first = key.internal_id(root, 0)
    cut = slot_map.splits.get(first)
    if cut is not None and cut < common.offset + len(block_ids) // ID_BYTES:
        raise UnknownPrefixError(
            f"offset: this sequence is cut at position {cut}; send its block IDs from position 0", field="offset"
        )
    return ChangePiece(slot_map.owner(slot_of(first)), replace(common, block_ids=block_ids, root=root))


def join_inserts(replies: Sequence[messages.InsertReply]) -> messages.InsertReply:
    """One reply of those of all shards, which have all applied their part."""
    return messages.InsertReply(
        applied=any(reply.applied for reply in replies),
        durable=all(reply.durable for reply in replies),
        blocks_added=sum(reply.blocks_added for reply in replies),
        epoch=max(reply.epoch for reply in replies),
    )


def join_removes(replies: Sequence[messages.RemoveReply]) -> messages.RemoveReply:
    """The same for a removal."""
    return messages.RemoveReply(
        applied=any(reply.applied for reply in replies),
        segments_changed=sum(reply.segments_changed for reply in replies),
        durable=all(reply.durable for reply in replies),
        epoch=max(reply.epoch for reply in replies),
    )


def joined_outcome(applied: int, errors: Sequence[messages.ErrorBody]) -> messages.ErrorBody:
    """The error of a change of which some parts failed, with what is known of the whole."""
    body = errors[0]
    outcomes = {error.outcome or "unknown" for error in errors}
    outcome: messages.Outcome = "not_applied"
    if applied or "partly_applied" in outcomes:
        outcome = "partly_applied"
    elif "unknown" in outcomes:
        outcome = "unknown"
    return replace(body, outcome=outcome)


def may_go_on(
    request: messages.InsertRequest | messages.RemoveRequest, applied: int, errors: Sequence[messages.ErrorBody]
) -> bool:
    """May a change of which some parts were refused as wrong_shard be planned anew, under the same seq?

    Not when a shard has applied a part, or may have: if the new map gives it another one as well, it would take that
    for a repetition. The caller sends all again, with a new seq.
    """
    return request.seq is None or not (applied or any(error.outcome != "not_applied" for error in errors))
