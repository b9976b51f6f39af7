"""The routing directory as the paper tells it: sorted lists of filters, searched by Algorithm 1. Slow and plain."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, NamedTuple

FILTER_BITS: Final = 128
"""Filters are integers of 128 bits here, fields from the most significant on; a 64-bit layout leaves the rest zero."""


class FilterLayout(NamedTuple):
    """How a filter divides into fields, and how many blocks a field covers."""

    field_bits: tuple[int, ...]
    stride: int

    @property
    def reach(self) -> int:
        """Blocks that all fields cover together."""
        return len(self.field_bits) * self.stride

    def mask(self, fields: int) -> int:
        """A mask that keeps the first `fields` fields."""
        kept = sum(self.field_bits[:fields])
        return (1 << FILTER_BITS) - (1 << FILTER_BITS - kept)

    def equal_fields(self, one: int, other: int) -> int:
        """Leading fields that agree."""
        fields = 0
        while fields < len(self.field_bits) and (one ^ other) & self.mask(fields + 1) == 0:
            fields += 1
        return fields


PAPER_LAYOUT: Final = FilterLayout((8,) * 8, stride=2)
"""64 bits: 8 fields of 8 bits, each over two blocks (paper §4.3)."""

WIDE_LAYOUT: Final = FilterLayout((16,) + (8,) * 14, stride=1)
"""128 bits: a first field of 16 bits, then 14 of 8, each over one block."""


class ReferenceDirectory:
    """Posting lists by key, each sorted by filter and then by slot, and the state of the points behind each key."""

    def __init__(self, layout: FilterLayout) -> None:
        self.layout = layout
        self.lists: dict[int, list[tuple[int, int]]] = {}
        self.states: dict[tuple[int, int], int] = {}

    def add(self, key: int, filter_value: int, slot: int) -> bool:
        """Register one posting; True if it is new."""
        listed = self.lists.setdefault(key, [])
        posting = (filter_value, slot)
        place = bisect_left(listed, posting)
        if place < len(listed) and listed[place] == posting:
            return False
        insort(listed, posting)
        return True

    def discard(self, key: int, filter_value: int, slot: int) -> bool:
        """Take one posting out; True if it was there."""
        listed = self.lists.get(key, [])
        if (filter_value, slot) not in listed:
            return False
        listed.remove((filter_value, slot))
        if not listed:
            del self.lists[key]
        return True

    def exists_match(self, key: int, query: int, blocks: int) -> bool:
        """Algorithm 1, ExistsMatch(L): may a listed segment match `blocks` blocks behind the point?"""
        mask = self.layout.mask(blocks // self.layout.stride)
        lowest = query & mask
        highest = lowest | (2**FILTER_BITS - 1 - mask)
        listed = self.lists.get(key, [])
        place = bisect_left(listed, (lowest, 0))
        return place < len(listed) and listed[place][0] <= highest

    def largest_potential(self, key: int, query: int) -> int:
        """Algorithm 1: the largest L for which ExistsMatch holds, by binary search; -1 where the list is empty."""
        low, high = -1, self.layout.reach
        while low < high:
            middle = (low + high + 1) // 2
            if self.exists_match(key, query, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def candidates(self, key: int, query: int) -> list[tuple[int, int]]:
        """(slot, equal leading fields) of all postings of a list, in no order that means anything."""
        return [(slot, self.layout.equal_fields(value, query)) for value, slot in self.lists.get(key, [])]

    def postings(self) -> list[tuple[int, int, int, int]]:
        """All postings and states as (key, high, low, slot), in order, as RoutingDirectory.postings gives them."""
        found = [
            (key, value >> 64, value & (2**64 - 1), slot)
            for key, listed in self.lists.items()
            for value, slot in listed
        ]
        return sorted(found + [(key, 0, 0, point << 6 | state) for (key, point), state in self.states.items()])
