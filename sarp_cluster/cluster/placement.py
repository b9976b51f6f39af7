"""Where a sequence belongs: its stretches, their slots, their owners (design §7).

A key is an *internal* block ID, so that tenants see nothing of one another's hot prefixes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sarp_cluster.cluster.slot_map import SLOTS, SlotMap
from sarp_cluster.core.block_id import NamespaceKey, xxh3_of_id

ID_BYTES: Final = 8


class Stretch(NamedTuple):
    """Positions [start, end) of a sequence, which one shard owns."""

    start: int
    end: int
    key: int
    """Internal ID of the block at `start`."""
    slot: int
    shard: str


def slot_of(key: int) -> int:
    """The slot of a placement key."""
    return xxh3_of_id(key) % SLOTS


def stretches(block_ids: bytes, key: NamespaceKey, slot_map: SlotMap, position: int = 0) -> list[Stretch]:
    """The stretches of a sequence, given as packed wire IDs from `position` on, where a stretch begins.

    None for an empty one. Positions are those of the whole sequence.
    """
    end = position + len(block_ids) // ID_BYTES
    found: list[Stretch] = []
    start = position
    while start < end:
        first = key.internal_id(block_ids, start - position)
        cut = slot_map.splits.get(first, end)
        cut = cut if start < cut < end else end
        slot = slot_of(first)
        found.append(Stretch(start, cut, first, slot, slot_map.owner(slot)))
        start = cut
    return found
