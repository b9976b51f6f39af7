"""What a shard or router keeps of the cluster, so that it can start while no coordinator is there (design §7).

The last slot map and registry that it was told, durably, and where the shards were. docs/formats.md describes the
file.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sarp_cluster.cluster.membership import RecordStore
from sarp_cluster.cluster.registry import Entry, Registry
from sarp_cluster.cluster.slot_map import PackedSlotMap, SlotMap
from sarp_cluster.cluster.view import Address, ClusterView
from sarp_cluster.errors import MembershipError

FORMAT_VERSION: Final = 1


class ShardPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a shard was last."""

    shard: str
    http: str
    stream: str


class ViewContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of the file."""

    version: int = FORMAT_VERSION
    cluster: str
    slot_map: PackedSlotMap | None
    number: int
    """Of the registry."""
    entries: list[Entry]
    nodes: list[ShardPlace]

    @classmethod
    def of(cls, cluster: str, slot_map: SlotMap | None, registry: Registry, nodes: list[ShardPlace]) -> ViewContent:
        """What a node has in memory, but for entries above its number: there may be others between, which it lacks."""
        return cls(
            cluster=cluster,
            slot_map=None if slot_map is None else slot_map.packed(),
            number=registry.number,
            entries=[entry for entry in registry.entries() if entry.number <= registry.number],
            nodes=nodes,
        )

    def unpacked_map(self) -> SlotMap | None:
        """The slot map."""
        return None if self.slot_map is None else SlotMap.unpacked(self.slot_map)

    def registry(self) -> Registry:
        """The registry."""
        return Registry(self.entries, self.number)


_decoder: Final = msgspec.msgpack.Decoder(ViewContent)
_encoder: Final = msgspec.msgpack.Encoder()


class _Versioned(msgspec.Struct):
    version: int


_version: Final = msgspec.msgpack.Decoder(_Versioned)


async def restore_view(store: RecordStore, view: ClusterView) -> None:
    """Enter what was saved last, if anything was, into a view that is empty. Raises as `load_view`."""
    content = await load_view(store)
    if content is not None:
        view.cluster = content.cluster
        view.slot_map = content.unpacked_map()
        view.registry = content.registry()
        view.addresses = {place.shard: Address(place.http, place.stream) for place in content.nodes}


async def keep_view(store: RecordStore, view: ClusterView) -> None:
    """Save a view. Durable when this returns."""
    places = [
        ShardPlace(shard=shard, http=address.http, stream=address.stream) for shard, address in view.addresses.items()
    ]
    await save_view(store, ViewContent.of(view.cluster, view.slot_map, view.registry, places))


async def load_view(store: RecordStore) -> ViewContent | None:
    """What was saved last; None: nothing was. Raises MembershipError when it makes no sense."""
    raw = await store.read()
    if raw is None:
        return None
    try:
        version = _version.decode(raw).version
        if version != FORMAT_VERSION:
            raise MembershipError(f"view: a view file of version {version}, this program reads {FORMAT_VERSION}")
        content = _decoder.decode(raw)
        content.unpacked_map()  # a map that cannot be used is found now, not when it is wanted
        return content
    except (msgspec.DecodeError, ValueError) as error:
        raise MembershipError(f"view: the file cannot be read: {error}") from error


async def save_view(store: RecordStore, content: ViewContent) -> None:
    """Replace what was saved. Durable when this returns."""
    try:
        await store.write(_encoder.encode(content))
    except OSError as error:
        raise MembershipError(f"view: the file cannot be written: {error}") from error
