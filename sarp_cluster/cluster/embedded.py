"""Embedded membership: the only coordinator of a machine keeps the records itself, in one file (design §7).

A second coordinator on the same file cannot open it: the file's lock is the leader election.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from sarp_cluster.cluster.membership import Records, RecordStore, ShardRecord
from sarp_cluster.cluster.registry import Entry, Registry
from sarp_cluster.cluster.slot_map import PackedSlotMap, SlotMap
from sarp_cluster.errors import EpochConflictError, MembershipError

FORMAT_VERSION: Final = 1


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file. docs/formats.md describes it."""

    version: int
    slot_map: PackedSlotMap | None
    number: int
    entries: list[Entry]
    shards: dict[str, ShardRecord]


_decoder: Final = msgspec.msgpack.Decoder(_Content)
_encoder: Final = msgspec.msgpack.Encoder()


class EmbeddedMembership:
    """See Membership. Make one with `open`."""

    def __init__(self, store: RecordStore, content: _Content) -> None:
        self._store = store
        self._slot_map = None if content.slot_map is None else SlotMap.unpacked(content.slot_map)
        self._registry = Registry(content.entries, content.number)
        self._shards = dict(content.shards)
        self._writing = asyncio.Lock()  # held across our own disk only

    @classmethod
    async def open(cls, store: RecordStore) -> EmbeddedMembership:
        """The records in `store`. Raises MembershipError when they cannot be read."""
        raw = await store.read()
        if raw is None:
            return cls(store, _Content(version=FORMAT_VERSION, slot_map=None, number=0, entries=[], shards={}))
        try:
            content = _decoder.decode(raw)
            if content.version != FORMAT_VERSION:
                raise MembershipError(
                    f"membership: records of version {content.version}, this program reads {FORMAT_VERSION}"
                )
            return cls(store, content)
        except (msgspec.DecodeError, ValueError) as error:
            raise MembershipError(f"membership: the records cannot be read: {error}") from error

    async def lead(self, coordinator: str) -> bool:
        """See Membership.lead: whoever has the file leads."""
        return bool(coordinator)

    async def resign(self) -> None:
        """See Membership.resign."""

    async def load(self) -> Records:
        """See Membership.load."""
        return Records(
            slot_map=self._slot_map,
            number=self._registry.number,
            entries=self._registry.entries(),
            shards=dict(self._shards),
        )

    async def discard(self) -> None:
        """See Membership.discard."""
        async with self._writing:
            await self._write_content(
                _Content(version=FORMAT_VERSION, slot_map=None, number=0, entries=[], shards={}),
            )
            self._slot_map, self._registry, self._shards = None, Registry(), {}

    async def put_slot_map(self, slot_map: SlotMap, *, expected: SlotMap | None) -> None:
        """See Membership.put_slot_map."""
        async with self._writing:
            if self._slot_map != expected:
                there = None if self._slot_map is None else self._slot_map.epoch
                raise EpochConflictError(f"epoch: the map that is there ({there}) is not the one expected")
            await self._write(slot_map=slot_map)
            self._slot_map = slot_map

    async def put_entries(self, entries: list[Entry], number: int) -> None:
        """See Membership.put_entries."""
        async with self._writing:
            registry = Registry(self._registry.entries(), self._registry.number)
            registry.apply(entries, number)
            await self._write(registry=registry)
            self._registry = registry

    async def put_shard(self, record: ShardRecord) -> None:
        """See Membership.put_shard."""
        async with self._writing:
            shards = {**self._shards, record.shard: record}
            await self._write(shards=shards)
            self._shards = shards

    async def close(self) -> None:
        """See Membership.close."""
        await self._store.close()

    async def _write(
        self,
        slot_map: SlotMap | None = None,
        registry: Registry | None = None,
        shards: dict[str, ShardRecord] | None = None,
    ) -> None:
        slot_map = slot_map or self._slot_map
        registry = registry or self._registry
        content = _Content(
            version=FORMAT_VERSION,
            slot_map=None if slot_map is None else slot_map.packed(),
            number=registry.number,
            entries=registry.entries(),
            shards=self._shards if shards is None else shards,
        )
        await self._write_content(content)

    async def _write_content(self, content: _Content) -> None:
        try:
            await self._store.write(_encoder.encode(content))
        except OSError as error:
            raise MembershipError(f"membership: the records cannot be written: {error}") from error
