"""What a node knows of its cluster: the slot map, what has no key, and where the shards are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sarp_cluster.cluster.registry import Entry, Registry
from sarp_cluster.cluster.slot_map import SlotMap


class Address(NamedTuple):
    """Where a shard is, and how it was last seen."""

    http: str
    """`host:port`, or empty."""
    stream: str
    incarnation: str = ""
    state: str = ""

    @property
    def stream_address(self) -> tuple[str, int] | None:
        """Host and port of its stream."""
        return split_address(self.stream)


class ClusterView:
    """Grows only: an older map or entry never replaces a newer one."""

    def __init__(
        self,
        cluster: str = "",
        slot_map: SlotMap | None = None,
        registry: Registry | None = None,
        addresses: Mapping[str, Address] | None = None,
    ) -> None:
        self.cluster = cluster
        self.slot_map = slot_map
        self.registry = Registry() if registry is None else registry  # one without entries counts as false
        self.addresses = dict(addresses or {})

    @property
    def epoch(self) -> int:
        """Of the slot map; 0: there is none."""
        return 0 if self.slot_map is None else self.slot_map.epoch

    @property
    def nonce(self) -> bytes:
        """Of the slot map."""
        return b"" if self.slot_map is None else self.slot_map.nonce

    @property
    def number(self) -> int:
        """Of the last change without a key."""
        return self.registry.number

    def behind(self, epoch: int, number: int) -> bool:
        """Is this newer than what is here?"""
        return epoch > self.epoch or number > self.number

    def newer_map(self, slot_map: SlotMap | None) -> SlotMap | None:
        """The map, if it is newer. Raises EpochConflictError."""
        return slot_map if slot_map is not None and slot_map.supersedes(self.slot_map) else None

    def news(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries that are newer than what is here, in the order of their numbers."""
        return sorted(filter(self.registry.lacks, entries), key=lambda entry: entry.number)


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of `host:port` ([host]:port for IPv6); None where it is not one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        return None
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
