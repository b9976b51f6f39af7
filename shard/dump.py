"""`sarp dump`: an index as lines of JSON that do not depend on its secret; `shard.load` makes an index of them again.

Block IDs are wire IDs: those of the records, with the permutation of their namespace undone. The lines, in this order
(docs/dump.md has every field):

    header      what this is, blocks a segment
    namespace   one a namespace, numbered from 1
    worker      one a worker, numbered from 0, with its generation and the last seq
    sequence    a stretch of a sequence: block IDs, from which position on they are new, and who holds which of them
    end         how many of each there were: a dump without it was cut off

A sequence's blocks before `first` stand in earlier lines: parents come before children, origins before copies. Only
what counts is told: locations of a worker's present generation. Blocks that nobody holds are told too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from sarp_cluster import limits
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.types import Tier
from shard.contents import Piece, Segment, mask_ranges, pieces
from shard.index import Index
from shard.namespaces import IndexNamespace
from shard.state import IndexState

FORMAT: Final = "sarp-dump"
FORMAT_VERSION: Final = 1
TIER_NAMES: Final = tuple(tier.name.lower() for tier in Tier)

Line = dict[str, Any]
Progress = Callable[[int], object]
"""Told how many segments more are done."""


async def dump(index: Index, progress: Progress | None = None) -> AsyncIterator[bytes]:
    """The lines of a dump, each ending in a newline. The index must not change meanwhile.

    Raises CorruptRecordError for a segment that cannot be read: a dump has all or is none.
    """
    state = index.state
    # Numbered anew: what was purged is left out.
    namespaces = {namespace.id: (number, namespace.key) for number, namespace in enumerate(index.namespaces, 1)}
    counts = {"namespaces": len(namespaces), "workers": state.workers.count, "sequences": 0, "blocks": 0}
    locations = 0
    yield _line(
        {
            "type": "header",
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "segment_blocks": state.config.segment_blocks,
        }
    )
    for number, namespace in enumerate(index.namespaces, 1):
        yield _line(_namespace(number, namespace))
    for number in range(state.workers.count):
        yield _line(_worker(state, number))
    async for piece in pieces(state):
        known = namespaces.get(piece.segments[0]["namespace"])
        if known is None:
            continue
        for part in _bounded(piece):
            line = _sequence(state, part, *known)
            counts["sequences"] += 1
            counts["blocks"] += line["offset"] + (len(line["blocks"]) + 1) // 17 - line["first"]
            locations += len(line["locations"])
            yield _line(line)
        if progress is not None:
            progress(len(piece.segments))
    yield _line({"type": "end", **counts, "locations": locations})


def _line(fields: Line) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _namespace(number: int, namespace: IndexNamespace) -> Line:
    spec = namespace.spec
    return {
        "type": "namespace",
        "namespace": number,
        "tenant": spec.tenant,
        "model": spec.model,
        "lora": spec.lora,
        "salt": spec.salt,
        "block_size": spec.block_size,
        "hash_profile": str(spec.hash_profile),
    }


def _worker(state: IndexState, number: int) -> Line:
    instance_id, dp_rank = state.workers.names[number]
    seq = state.workers.seq(number)
    return {
        "type": "worker",
        "worker": number,
        "instance_id": instance_id,
        "dp_rank": dp_rank,
        "generation": state.workers.generation(number),
        "seq": None if seq < 0 else seq,
    }


def _bounded(piece: Piece) -> Iterator[Piece]:
    """The piece in parts whose lines are not too long: where blocks have very many holders."""
    before, part, runs = piece.before, list[Segment](), 0
    for segment in piece.segments:
        more = sum((run["mask"] & ~(run["mask"] << 1)).bit_count() for run in segment["runs"])
        if part and runs + more > limits.LOCATION_RUNS_MAX:
            yield Piece(before, part)
            before, part, runs = part[-1], [], 0
        part.append(segment)
        runs += more
    yield Piece(before, part)


def _sequence(state: IndexState, piece: Piece, namespace: int, key: NamespaceKey) -> Line:
    size = state.config.segment_blocks
    head = piece.segments[0]
    told = piece.segments if piece.before is None else [piece.before, *piece.segments]
    ids = [block_id for segment in told for block_id in segment["ids"]]
    return {
        "type": "sequence",
        "namespace": namespace,
        "offset": told[0]["window"] * size,
        "first": head["window"] * size + head["fork"],
        "blocks": wire_text(key, ids),
        "locations": _locations(state, piece.segments, size),
    }


def wire_text(key: NamespaceKey, internal: list[int]) -> str:
    """Internal IDs as the text of their wire IDs: 16 hexadecimal digits each, separated by blanks."""
    count = len(internal)
    wire = key.wire_ids(struct.pack(f"<{count}Q", *internal))
    return struct.pack(f">{count}Q", *struct.unpack(f"<{count}Q", wire)).hex(" ", 8)


def _locations(state: IndexState, segments: list[Segment], size: int) -> list[Line]:
    """Live location runs by worker, tier and place; those that go on in the next segment are one."""
    found: list[list[Any]] = []
    last: dict[tuple[int, int, int | None], list[Any]] = {}
    for segment in segments:
        begin = segment["window"] * size
        for run in segment["runs"]:
            if run["generation"] != state.workers.generation(run["worker"]):
                continue
            holder = (run["worker"], run["tier"], run["handle"])
            for first, count in mask_ranges(run["mask"]):
                known = last.get(holder)
                if known is not None and known[3] + known[4] == begin + first:
                    known[4] += count
                else:
                    last[holder] = [*holder, begin + first, count]
                    found.append(last[holder])
    found.sort(key=lambda one: (one[0], one[1], one[3]))
    return [_location(*one) for one in found]


def _location(worker: int, tier: int, handle: int | None, first: int, count: int) -> Line:
    location: Line = {"worker": worker, "tier": TIER_NAMES[tier], "first": first, "count": count}
    if handle is not None:
        location["handle"] = f"{handle:016x}"
    return location
