"""Membership: the records that coordinators keep, and which of them leads (design §7).

One interface, two backends: `sarp_cluster.cluster.embedded`, for one machine, and Redis. What they hold is never the
truth about data: shards hold the slot map and the registry, too, and a coordinator that finds less here than its shards
know takes what they know.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from sarp_cluster.cluster.registry import Entry
from sarp_cluster.cluster.slot_map import SlotMap


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A shard that has joined."""

    shard: str
    store: str
    """Identity of its directory, made with it: another one under the same name is another shard, and refused."""
    incarnation: str
    """Of its process: new with each start."""
    http: str
    """`host:port` of its HTTP wire; empty: none."""
    stream: str
    """`host:port` of its stream."""


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """All that a backend holds."""

    slot_map: SlotMap | None
    number: int
    """Of the last change of the registry."""
    entries: list[Entry]
    shards: dict[str, ShardRecord]


class Membership(Protocol):
    """What a coordinator needs of a backend. Everything it puts is durable when the call returns.

    Raises MembershipError when the backend cannot be reached or refuses, NotLeaderError when this coordinator may not
    write because another leads, or because what it would build upon is not there any more: then `lead` is False once,
    and it begins again. Every call ends within limits.MEMBERSHIP_TIMEOUT_MS, but for `load` of very many records.
    """

    async def lead(self, coordinator: str) -> bool:
        """Become the leader, or stay it, for limits.LEADER_LEASE_MS from when this was called. False: another leads."""

    async def resign(self) -> None:
        """Lead no longer, if this coordinator does."""

    async def load(self) -> Records:
        """All records. Raises RecordsRejectedError when they are not what a coordinator of this cluster wrote."""

    async def discard(self) -> None:
        """Drop all records, those that `load` rejects, too: the shards know what was in them."""

    async def put_slot_map(self, slot_map: SlotMap, *, expected: SlotMap | None) -> None:
        """Replace the map `expected` (None: there is none yet). Raises EpochConflictError when another one is there."""

    async def put_entries(self, entries: list[Entry], number: int) -> None:
        """Enter changed entries of the registry, whose last change is `number`."""

    async def put_shard(self, record: ShardRecord) -> None:
        """Enter a shard's record in place of any that has its name."""

    async def close(self) -> None:
        """Resign and let go."""


class RecordStore(Protocol):
    """A file's content, replaced as a whole: what `sarp_cluster.storage.record_file` gives to those who may not touch
    the disk themselves."""

    async def read(self) -> bytes | None:
        """What was written last; None: nothing ever was."""

    async def write(self, content: bytes) -> None:
        """Replace the content. Durable when this returns; after a failure or a crash it is the old or the new one."""

    async def close(self) -> None:
        """Let go of it, so that another process may have it."""
