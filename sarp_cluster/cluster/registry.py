"""What has no placement key: namespaces, workers, tenants. Every node has all of it (design §6).

A change has a number, given by the coordinator like an epoch. The registry is a state, not a log: each entry has the
number of its last change, so a node that was away asks for the entries above the highest number it has, and what
changed twice meanwhile comes once.

Invariants (checked by `validate`):
  G1  numbers are positive and no two entries have the same;
  G2  `number` is the highest of them, or higher (what the highest changed may have been changed again);
  G3  a worker's generation and a tenant's purges never go back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from sarp_cluster.errors import invariant
from sarp_cluster.types import NamespaceSpec, Worker


class NamespaceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="namespace"):
    """A namespace that was created."""

    number: int
    id: str
    """What requests name it by."""
    spec: NamespaceSpec


class WorkerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="worker"):
    """A worker that was registered."""

    number: int
    instance_id: str
    dp_rank: int
    owner: str
    """Name of the credential that registered it: only it may change what the worker holds."""
    generation: int = 0
    """Of its cache: what it held in an earlier one is gone."""
    heartbeat_ttl_ms: int = 0
    """Silent for longer, it is left out of answers until it is heard again. 0: it sends none."""
    draining: bool = False
    """Left out of answers; may still remove."""
    gone: bool = False
    """Deregistered. The entry stays, so that its generation does."""

    @property
    def worker(self) -> Worker:
        """Its name."""
        return Worker(self.instance_id, self.dp_rank)


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tenant"):
    """A tenant that was purged."""

    number: int
    tenant: str
    purges: int
    """How often: its namespaces have other keys after each, so nothing from before is found."""


Entry: TypeAlias = NamespaceEntry | WorkerEntry | TenantEntry


class Registry:
    """All entries, by what they are about."""

    def __init__(self, entries: Iterable[Entry] = (), number: int = 0) -> None:
        self.number = number
        """Number of the last change that is in it."""
        self.namespaces: dict[str, NamespaceEntry] = {}
        self.workers: dict[Worker, WorkerEntry] = {}
        self.tenants: dict[str, TenantEntry] = {}
        self.apply(entries)

    def __len__(self) -> int:
        return len(self.namespaces) + len(self.workers) + len(self.tenants)

    def lookup(self, entry: Entry) -> Entry | None:
        """What stands here about the same thing."""
        match entry:
            case NamespaceEntry():
                return self.namespaces.get(entry.id)
            case WorkerEntry():
                return self.workers.get(entry.worker)
            case TenantEntry():
                return self.tenants.get(entry.tenant)

    def lacks(self, entry: Entry) -> bool:
        """Is it newer than what stands here about the same thing?"""
        known = self.lookup(entry)
        return known is None or known.number < entry.number

    def apply(self, entries: Iterable[Entry], number: int = 0) -> list[Entry]:
        """Enter what is newer than what is here, in the order of the numbers; returns that.

        `number` is that of the registry they come from, if they are all it has above `self.number`.
        """
        news = []
        for entry in sorted(entries, key=lambda entry: entry.number):
            if not self.lacks(entry):
                continue
            match entry:
                case NamespaceEntry():
                    self.namespaces[entry.id] = entry
                case WorkerEntry():
                    self.workers[entry.worker] = entry
                case TenantEntry():
                    self.tenants[entry.tenant] = entry
            news.append(entry)
            self.number = max(self.number, entry.number)
        self.number = max(self.number, number)
        return news

    def entries(self, above: int = 0) -> list[Entry]:
        """Entries whose last change is above a number, in the order of their numbers."""
        every: list[Entry] = [*self.namespaces.values(), *self.workers.values(), *self.tenants.values()]
        return sorted((entry for entry in every if entry.number > above), key=lambda entry: entry.number)

    def purges(self, tenant: str) -> int:
        """How often a tenant was purged."""
        entry = self.tenants.get(tenant)
        return 0 if entry is None else entry.purges

    def validate(self) -> None:
        """Raise InvariantViolationError for the first violated invariant."""
        numbers = [entry.number for entry in self.entries(above=-(2**63))]
        invariant(all(number > 0 for number in numbers), "G1: a number is not positive")
        invariant(len(set(numbers)) == len(numbers), "G1: two entries have the same number")
        invariant(not numbers or self.number >= numbers[-1], "G2: the registry's number", number=self.number)
