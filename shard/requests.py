"""Checks of what callers give: each bad field is refused by name, with its limit, before anything changes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sarp_cluster import limits
from sarp_cluster.core.worker_table import WorkerTable
from sarp_cluster.errors import BadRequestError, TooLargeError
from sarp_cluster.types import Tier, Worker

DETAILS: Final = ("none", "workers", "blocks")
ALL_TIERS: Final = 0b1111
BLOCK_ID_BYTES: Final = 8


def check_block_ids(block_ids: object, offset: int = 0) -> bytes:
    """Packed wire IDs, as bytes."""
    if not isinstance(block_ids, bytes):
        if not isinstance(block_ids, bytearray | memoryview):
            raise BadRequestError("block_ids: must be bytes: u64 little-endian, one after the other", field="block_ids")
        block_ids = bytes(block_ids)
    if len(block_ids) % BLOCK_ID_BYTES:
        raise BadRequestError(f"block_ids: {len(block_ids)} bytes are not a multiple of 8", field="block_ids")
    if offset + len(block_ids) // BLOCK_ID_BYTES > limits.REQUEST_BLOCKS_MAX:
        raise TooLargeError(
            f"block_ids: the sequence has {offset + len(block_ids) // BLOCK_ID_BYTES} blocks, "
            f"the limit is {limits.REQUEST_BLOCKS_MAX}",
            field="block_ids",
        )
    return block_ids


def check_sequence(block_ids: object, offset: int = 0) -> bytes:
    """Packed wire IDs of a change: at least one."""
    checked = check_block_ids(block_ids, offset)
    if not checked:
        raise BadRequestError("block_ids: empty; a change names at least one block", field="block_ids")
    return checked


def check_integer(value: object, field: str, highest: int, lowest: int = 0) -> int:
    """An integer in lowest..highest."""
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise BadRequestError(f"{field}: {value!r} is not an integer in {lowest}..{highest}", field=field)
    return value


def check_worker(worker: object) -> Worker:
    """A worker's name."""
    if not isinstance(worker, Worker):
        raise BadRequestError("worker: must be a Worker(instance_id, dp_rank)", field="worker")
    name: object = worker.instance_id  # a NamedTuple checks no types
    if not isinstance(name, str) or not 1 <= len(name.encode()) <= limits.NAME_BYTES_MAX:
        raise BadRequestError(f"instance_id: must be a string of 1..{limits.NAME_BYTES_MAX} bytes", field="instance_id")
    check_integer(worker.dp_rank, "dp_rank", limits.DP_RANK_MAX)
    return worker


def check_tier(tier: object) -> Tier:
    """A tier."""
    try:
        return Tier(tier)  # type: ignore[arg-type]  # whatever it is, Tier says whether it is one
    except ValueError:
        raise BadRequestError(
            f"tier: {tier!r} is not one of 0 (gpu), 1 (cpu), 2 (ssd), 3 (remote)", field="tier"
        ) from None


def check_range(first: object, offset: int, end: int, segment_blocks: int) -> None:
    """`first` and `offset` of a change whose sequence ends before position `end`."""
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first < end:
        raise BadRequestError(f"first: {first!r} is not a position in 0..{end - 1}", field="first")
    if offset and (offset % segment_blocks or first < offset + segment_blocks):
        raise BadRequestError(
            f"offset: {offset} is not a multiple of {segment_blocks} that leaves at least {segment_blocks} blocks "
            f"before first ({first})",
            field="offset",
        )


def tier_mask(tiers: Collection[Tier] | None) -> int:
    """Bit i: tier i counts."""
    if tiers is None:
        return ALL_TIERS
    mask = 0
    for tier in tiers:
        mask |= 1 << check_tier(tier)
    return mask


def worker_mask(workers: Collection[Worker] | None, table: WorkerTable, live: bytes | None) -> bytes | None:
    """One byte a known worker, 1 where it is one of `workers` (None: any) and live; None: all count."""
    if workers is None:
        return live
    mask = bytearray(table.count)
    for worker in workers:
        index = table.find(*check_worker(worker))
        if index is not None:
            mask[index] = 1 if live is None else live[index]
    return bytes(mask)
