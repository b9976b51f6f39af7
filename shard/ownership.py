"""What this shard owns: every data request is judged by it, under the shard's own slot map (design §7)."""

from __future__ import annotations

from sarp_cluster.cluster.placement import ID_BYTES, slot_of
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.errors import RecoveringError, WrongShardError


class Ownership:
    """Judges stretches."""

    def __init__(self, shard: str, view: ClusterView) -> None:
        self._shard = shard
        self._view = view

    def check_number(self, number: int) -> None:
        """Raise RecoveringError where the caller knows of changes without a key that this shard does not.

        So what a router knows to be cleared comes from no shard any more, even from one that no coordinator reaches.
        """
        if number > self._view.number:
            raise RecoveringError(f"this shard has not heard of change {number} yet")

    def check(self, block_ids: bytes, key: NamespaceKey, position: int, epoch: int | None) -> None:
        """Raise WrongShardError unless these blocks are one stretch, or its beginning, and this shard's.

        `position` is that of the first one in the whole sequence. Whether a stretch begins there only the blocks before
        it tell, so who sends one from the middle has to have cut it by the same map.
        """
        slot_map = self._map(position, epoch)
        if block_ids:
            self._check_first(key.internal_id(block_ids, 0), slot_map, position, position + len(block_ids) // ID_BYTES)

    def check_tail(self, root: bytes, key: NamespaceKey, end: int, position: int, epoch: int | None) -> None:
        """The same for a stretch of which only the first block ID, and its end, are given."""
        self._check_first(key.internal_id(root, 0), self._map(position, epoch), position, end)

    def _check_first(self, first: int, slot_map: SlotMap, position: int, end: int) -> None:
        owner = slot_map.owner(slot_of(first))
        if owner != self._shard:
            raise self._wrong(f"they belong to {owner}")
        cut = slot_map.splits.get(first)
        if cut is not None and position < cut < end:
            raise self._wrong(f"the sequence is cut at position {cut}")

    def _map(self, position: int, epoch: int | None) -> SlotMap:
        slot_map = self._view.slot_map
        if slot_map is None:
            raise RecoveringError("this shard has no slot map yet")
        if position and epoch != slot_map.epoch:
            raise self._wrong("the stretch was cut by another slot map")
        return slot_map

    def _wrong(self, why: str) -> WrongShardError:
        return WrongShardError(
            f"block_ids: {why} under slot map {self._view.epoch}; fetch the slot map (GET /v1/slots)",
            epoch=self._view.epoch,
            number=self._view.number,
        )
