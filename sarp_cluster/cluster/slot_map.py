"""The slot map: which shard owns which part of the key space, and where sequences are cut (design §7).

Invariants (checked when one is made):
  M1  each of the SLOTS slots has exactly one owner, which is one of the map's shards;
  M2  a split's position is a multiple of SEGMENT_BLOCKS_MAX, greater than 0 and within limits.REQUEST_BLOCKS_MAX;
  M3  a map is never changed: a change makes another one, whose epoch is higher by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, EpochConflictError, TooLargeError

SLOTS: Final = 4096
FORMAT_VERSION: Final = 1
NONCE_BYTES: Final = 16


class PackedSlotMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A slot map as it is sent and stored."""

    version: int
    epoch: int
    nonce: bytes
    shards: list[str]
    owners: bytes
    """SLOTS times a u16, little-endian: the slot's owner as an index into `shards`."""
    splits: dict[int, int]


class SlotMap:
    """One epoch's assignment of slots to shards, and its split table."""

    __slots__ = ("_owners", "epoch", "nonce", "shards", "splits")

    def __init__(
        self, *, epoch: int, nonce: bytes, shards: Iterable[str], owners: Iterable[int], splits: Mapping[int, int]
    ) -> None:
        self.epoch = epoch
        """Number of the map: only grows."""
        self.nonce = nonce
        """Of the coordinator that made it: the same number with another nonce is another map."""
        self.shards = tuple(shards)
        self._owners = array("H", owners)
        self.splits = MappingProxyType(dict(splits))
        """Internal block ID at which a stretch begins -> position at which the next one does."""
        self._check()

    def _check(self) -> None:
        if not 1 <= self.epoch < 2**63:
            raise BadRequestError(f"epoch: {self.epoch} is not in 1..2^63 - 1", field="epoch")
        if len(self.nonce) != NONCE_BYTES:
            raise BadRequestError(f"nonce: {len(self.nonce)} bytes, not {NONCE_BYTES}", field="nonce")
        if not 1 <= len(self.shards) <= limits.SHARDS_MAX or len(set(self.shards)) != len(self.shards):
            raise BadRequestError(f"shards: not 1..{limits.SHARDS_MAX} different names", field="shards")
        if len(self._owners) != SLOTS or max(self._owners) >= len(self.shards):
            raise BadRequestError(f"owners: not {SLOTS} indices of shards", field="owners")
        if len(self.splits) > limits.SPLITS_MAX:
            raise TooLargeError(f"splits: {len(self.splits)} are over the limit of {limits.SPLITS_MAX}", field="splits")
        for key, position in self.splits.items():
            if not 0 <= key < 2**64:
                raise BadRequestError(f"splits: {key} is not a block ID", field="splits")
            if position % limits.SEGMENT_BLOCKS_MAX or not 0 < position < limits.REQUEST_BLOCKS_MAX:
                raise BadRequestError(
                    f"splits: position {position} is not a multiple of {limits.SEGMENT_BLOCKS_MAX} in "
                    f"1..{limits.REQUEST_BLOCKS_MAX - 1}",
                    field="splits",
                )

    @classmethod
    def first(cls, shards: Iterable[str], nonce: bytes, splits: Mapping[int, int] | None = None) -> SlotMap:
        """The first map of a cluster: each shard has an equal share, in contiguous ranges."""
        names = sorted(shards)
        count = max(1, len(names))
        owners = (slot * count // SLOTS for slot in range(SLOTS))
        return cls(epoch=1, nonce=nonce, shards=names, owners=owners, splits=splits or {})

    def changed(
        self, *, nonce: bytes, splits: Mapping[int, int] | None = None, owners: Mapping[int, str] | None = None
    ) -> SlotMap:
        """The next map, with another split table or some slots given to other shards."""
        shards = list(self.shards)
        numbers = self._owners[:]
        for slot, name in (owners or {}).items():
            if name not in shards:
                shards.append(name)
            numbers[slot] = shards.index(name)
        return SlotMap(
            epoch=self.epoch + 1,
            nonce=nonce,
            shards=shards,
            owners=numbers,
            splits=self.splits if splits is None else splits,
        )

    def owner(self, slot: int) -> str:
        """The shard that owns a slot."""
        return self.shards[self._owners[slot]]

    def slots_of(self, shard: str) -> list[int]:
        """The slots that a shard owns."""
        return [slot for slot, number in enumerate(self._owners) if self.shards[number] == shard]

    def supersedes(self, other: SlotMap | None) -> bool:
        """Is this map newer than the other? Raises EpochConflictError for another map of the same number."""
        if other is None:
            return True
        if self.epoch == other.epoch and self.nonce != other.nonce:
            raise EpochConflictError(
                f"epoch: two maps have the number {self.epoch}, of different coordinators; the one already here stays"
            )
        return self.epoch > other.epoch

    def packed(self) -> PackedSlotMap:
        """The map as it is sent and stored."""
        return PackedSlotMap(
            version=FORMAT_VERSION,
            epoch=self.epoch,
            nonce=self.nonce,
            shards=list(self.shards),
            owners=_little_endian(self._owners).tobytes(),
            splits=dict(self.splits),
        )

    @classmethod
    def unpacked(cls, packed: PackedSlotMap) -> SlotMap:
        """The map of what was sent or stored; BadRequestError if it makes no sense."""
        if packed.version != FORMAT_VERSION:
            raise BadRequestError(
                f"version: a slot map of version {packed.version}, this program reads {FORMAT_VERSION}", field="version"
            )
        owners = array("H")
        if len(packed.owners) != SLOTS * owners.itemsize:
            raise BadRequestError(f"owners: {len(packed.owners)} bytes, not {SLOTS * owners.itemsize}", field="owners")
        owners.frombytes(packed.owners)
        return cls(
            epoch=packed.epoch,
            nonce=packed.nonce,
            shards=packed.shards,
            owners=_little_endian(owners),
            splits=packed.splits,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlotMap) and self.packed() == other.packed()

    def __hash__(self) -> int:
        return hash((self.epoch, self.nonce))


def _little_endian(numbers: array[int]) -> array[int]:
    """The numbers in the byte order of the format, whatever the machine's is."""
    if array("H", [1]).tobytes() == b"\x01\x00":
        return numbers
    swapped = numbers[:]
    swapped.byteswap()
    return swapped
