"""Checks of a whole index that need its segments: what `validate()` promises beyond the core's own checks.

Invariants (the core's D1-D3 and S1-S4 first):
  V1  every segment can be read, and its records agree with its row;
  V2  a copy holds the same block IDs as its origin before the fork;
  V3  location runs are sorted, not empty, at home (inside [fork, count)), and a block is in one run of a
      (worker, tier);
  V4  every segment is registered at its first block, and at each point behind an entry that is published, with the
      filter of its present blocks; nothing else is registered, but for entries that are being built, and for what
      stale segments (core.removal) were.
  V5  of each log file it is known how many bytes segments point to, once they were counted.
V4 is the entry-level invariant of design §4.
"""

from __future__ import annotations

from typing import Any, Final

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import invariant
from sarp_cluster.storage.log import LogStore
from shard.state import IndexState

SEGMENTS_A_READ: Final = 256
FIRST_SLOT: Final = 4096
STATE_BITS: Final = 6
NEXT, MIDPOINT, LAST_BLOCK = 0, 2, 4
PUBLISHED: Final = 2
Posting = tuple[int, int, int, int]


async def validate(state: IndexState) -> None:
    """Raise InvariantViolationError for the first violated invariant."""
    state.directory.validate()
    state.table.validate(state.config.segment_blocks)
    segments = await _read_all(state)
    for segment in segments.values():
        _check_segment(segment, segments)
    _check_entries(state, segments)
    if isinstance(state.store, LogStore):
        _check_books(state.store, state.table)


async def _read_all(state: IndexState) -> dict[int, dict[str, Any]]:
    segments: dict[int, dict[str, Any]] = {}
    for slots in state.table.slots_in_use(SEGMENTS_A_READ):
        search = state.search()
        search.load_segments(slots)
        batch = search.batch
        if state.store.read_cached(batch):
            await state.wait_for(batch)
        for segment in batch.describe():
            invariant(segment["state"] == 1, "V1: a segment does not verify", **segment)
            segments[segment["slot"]] = segment
        state.idle_searches.append(search)
    return segments


def _check_segment(segment: dict[str, Any], segments: dict[int, dict[str, Any]]) -> None:
    fork = segment["fork"]
    if segment["origin"]:
        origin = segments[segment["origin"]]
        invariant(
            origin["ids"][:fork] == segment["ids"][:fork], "V2: a copy differs from its origin", slot=segment["slot"]
        )
    home = (1 << segment["count"]) - (1 << fork)
    held: dict[tuple[int, int], int] = {}
    order = [(run["worker"], run["tier"]) for run in segment["runs"]]
    invariant(order == sorted(order), "V3: runs are not sorted", slot=segment["slot"], order=order)
    for run in segment["runs"]:
        holder = (run["worker"], run["tier"])
        invariant(
            run["mask"] and run["mask"] & ~home == 0, "V3: a run is empty or not at home", slot=segment["slot"], **run
        )
        invariant(run["mask"] & held.get(holder, 0) == 0, "V3: a block is in two runs", slot=segment["slot"], **run)
        held[holder] = held.get(holder, 0) | run["mask"]


def _check_books(store: LogStore, table: SegmentTable) -> None:
    files = store.space.files
    live: dict[int, int] = {}
    for slots in table.slots_in_use(SEGMENTS_A_READ):
        for row in map(table.describe, slots):
            for place in (row["image"], row["delta"]) if row else ():
                live[place >> 48] = live.get(place >> 48, 0) + (place >> 32 & 0xFFFF) * 8
    if files.counted:  # until then the sum, too, may be what a snapshot had
        invariant(files.live_bytes == sum(live.values()), "V5: live bytes", counted=files.live_bytes, found=live)
        for number in files.listed | live.keys():
            counted = files.live_in(number)
            invariant(counted == live.get(number, 0), "V5: live bytes of a file", number=number, counted=counted)
        invariant(live.keys() <= files.listed | {0}, "V5: a segment points to a file that is gone", found=live)


def _filter(config: IndexConfig, ids: list[int], point: int) -> tuple[int, int]:
    """The filter at a point, as core.candidate_filter makes it."""
    bits, value, width, shift = config.filter_bits, 0, config.filter_first_bits, config.filter_bits
    block = point + config.filter_lead + config.stride - 1
    while config.filter and shift >= width and block < len(ids):
        shift -= width
        value |= (ids[block] & (2 ** (config.filter_field_bits * width // 8) - 1)) << shift
        width = 8
        block += config.stride
    value <<= 128 - bits
    return value >> 64, value & (2**64 - 1)


def _successors(config: IndexConfig, point: int) -> list[tuple[int, int]]:
    """(kind, point) of the points behind a point, as core.routing_points has them."""
    size = config.segment_blocks
    interval = size // config.base_points
    if point % interval == 0:
        behind = [(MIDPOINT, point + interval // 2)]
        if point + interval < size:
            behind.append((NEXT, point + interval))
        return behind
    if point == size - interval + interval // 2 and point != size - 1:
        return [(LAST_BLOCK, size - 1)]
    return []


def _check_entries(state: IndexState, segments: dict[int, dict[str, Any]]) -> None:
    config = state.config
    key_mask = ~(2 ** (64 - config.routing_key_bits) - 1)
    postings = state.directory.postings()
    states = {
        (key, slot >> STATE_BITS): slot & (2**STATE_BITS - 1) for key, _, _, slot in postings if slot < FIRST_SLOT
    }
    registered = {posting for posting in postings if posting[3] >= FIRST_SLOT}
    required: set[Posting] = set()
    allowed: set[Posting] = set()

    def walk(segment: dict[str, Any], point: int, into: set[Posting]) -> None:
        key = segment["ids"][point] & key_mask
        into.add((key, *_filter(config, segment["ids"], point), segment["slot"]))
        for kind, target in _successors(config, point):
            published = (states.get((key, point), 0) >> kind) & 3
            if kind == NEXT and not config.prune:
                published = PUBLISHED
            if published and target < segment["count"]:
                walk(segment, target, into if published == PUBLISHED else allowed)

    for segment in segments.values():
        walk(segment, 0, required)
    missing = required - registered
    invariant(not missing, "V4: not registered", missing=sorted(missing)[:3], count=len(missing))
    stray = {posting for posting in registered - required - allowed if posting[3] not in state.table.stale}
    invariant(not stray, "V4: registered without reason", stray=sorted(stray)[:3], count=len(stray))
