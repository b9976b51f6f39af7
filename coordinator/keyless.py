"""Changes without a key get their number here, one after the other, and go to all shards (design §6).

A change is checked against the registry, numbered, kept in the membership and only then spread: a number that anybody
has heard of is never given again. Those that wait are kept and spread together. Who asks the same again gets the same
entry, and waits for the shards that lacked it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias

from msgspec import structs

from sarp_cluster import limits
from sarp_cluster.cluster.membership import Membership
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.errors import (
    BadRequestError,
    ExistsError,
    ForbiddenError,
    OverloadedError,
    SarpError,
    StaleGenerationError,
    StorePoisonedError,
    TooLargeError,
    UnknownWorkerError,
)
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from sarp_cluster.wire.control import (
    ClearWorker,
    KeylessChange,
    NewNamespace,
    NewWorker,
    PurgeTenant,
    RetireWorker,
)
from sarp_cluster.wire.messages import WorkerName

Spread: TypeAlias = Callable[[int], Awaitable[list[str]]]
"""Give all serving shards the registry up to a number, durably; returns the names of those that do not have it."""

PROFILES: Final = frozenset(profile.value for profile in HashProfile)


class Changed(NamedTuple):
    """A change that was made."""

    entry: Entry
    missing: list[str]
    """Serving shards that do not have it durably yet."""


class _Waiting(NamedTuple):
    change: KeylessChange
    made: asyncio.Future[Changed]


class _Draft:
    """The registry with the changes of a batch on top, which nobody else sees yet."""

    def __init__(self, registry: Registry, number: int = 0) -> None:
        self._registry = registry
        self._batch = Registry()
        self.number = max(registry.number, number)
        """Of the last change, those of the batch included."""

    @property
    def entries(self) -> list[Entry]:
        """What the batch has changed."""
        return self._batch.entries()

    def namespace(self, name: str) -> NamespaceEntry | None:
        """What stands about a namespace."""
        return self._batch.namespaces.get(name) or self._registry.namespaces.get(name)

    def worker(self, worker: Worker) -> WorkerEntry | None:
        """What stands about a worker."""
        return self._batch.workers.get(worker) or self._registry.workers.get(worker)

    def purges(self, tenant: str) -> int:
        """How often a tenant was purged."""
        return max(self._batch.purges(tenant), self._registry.purges(tenant))

    @property
    def namespaces(self) -> int:
        """How many there are, at most."""
        return len(self._registry.namespaces) + len(self._batch.namespaces)

    @property
    def workers(self) -> int:
        """How many there are, at most."""
        return len(self._registry.workers) + len(self._batch.workers)

    def enter(self, make: Callable[[int], Entry]) -> Entry:
        """A new entry with the next number."""
        self.number += 1
        entry = make(self.number)
        self._batch.apply([entry])
        return entry


def decide(draft: _Draft, change: KeylessChange) -> Entry:
    """The entry that a change makes, or the one that says so already. Raises RequestError; then nothing changed."""
    match change:
        case NewNamespace():
            return _namespace(draft, change)
        case NewWorker():
            return _register(draft, change)
        case ClearWorker():
            return _clear(draft, change)
        case RetireWorker():
            return _retire(draft, change)
        case PurgeTenant():
            return draft.enter(lambda number: TenantEntry(number, change.tenant, draft.purges(change.tenant) + 1))


def _namespace(draft: _Draft, change: NewNamespace) -> Entry:
    if change.hash_profile not in PROFILES:
        raise BadRequestError(f"hash_profile: {change.hash_profile!r} is not one of ours", field="hash_profile")
    if not 1 <= change.block_size <= limits.BLOCK_TOKENS_MAX:
        raise BadRequestError(f"block_size: not 1 to {limits.BLOCK_TOKENS_MAX}", field="block_size")
    spec = NamespaceSpec(
        tenant=change.tenant,
        model=change.model,
        lora=change.lora,
        salt=change.salt,
        block_size=change.block_size,
        hash_profile=HashProfile(change.hash_profile),
    )
    known = draft.namespace(change.id)
    if known is not None:
        if known.spec != spec:
            raise ExistsError(f"namespace: {change.id!r} is there already and is another one", field="namespace")
        return known
    if draft.namespaces >= limits.NAMESPACES_MAX:
        raise TooLargeError(f"namespaces: the limit is {limits.NAMESPACES_MAX}", field="namespace")
    return draft.enter(lambda number: NamespaceEntry(number, change.id, spec))


def _register(draft: _Draft, change: NewWorker) -> Entry:
    worker = Worker(change.worker.worker, change.worker.dp_rank)
    known = draft.worker(worker)
    if known is None:
        if draft.workers >= limits.WORKERS_MAX:
            raise TooLargeError(f"workers: the limit is {limits.WORKERS_MAX}", field="worker")
        return draft.enter(
            lambda number: WorkerEntry(number, *worker, change.owner, heartbeat_ttl_ms=change.heartbeat_ttl_ms)
        )
    if known.owner != change.owner:
        raise ForbiddenError(f"{_called(change.worker)} belongs to another credential", field="worker")
    wanted = structs.replace(
        known,
        heartbeat_ttl_ms=change.heartbeat_ttl_ms,
        draining=False,
        gone=False,
        # What it held before it went is not there any more.
        generation=_next(known) if known.gone else known.generation,
    )
    if wanted == known:
        return known
    return draft.enter(lambda number: structs.replace(wanted, number=number))


def _clear(draft: _Draft, change: ClearWorker) -> Entry:
    known = _known(draft, change.worker)
    generation = _next(known) if change.generation is None else change.generation
    if change.generation is not None and generation == known.generation:
        return known  # a repetition: the first may not have been answered. Who lost count names no generation
    if generation <= known.generation:
        raise StaleGenerationError(
            f"generation: {_called(change.worker)} is in generation {known.generation} already, {generation} is not "
            "above it",
            field="generation",
        )
    if generation > limits.GENERATION_MAX:
        raise TooLargeError(
            f"generation: {generation} is over the limit of {limits.GENERATION_MAX}", field="generation"
        )
    return draft.enter(lambda number: structs.replace(known, number=number, generation=generation))


def _retire(draft: _Draft, change: RetireWorker) -> Entry:
    worker = Worker(change.worker.worker, change.worker.dp_rank)
    known = draft.worker(worker)
    if known is None or (known.gone and not change.gone):
        raise UnknownWorkerError(f"{_called(change.worker)} is not registered", field="worker")
    if known.gone if change.gone else known.draining:
        return known
    return draft.enter(lambda number: structs.replace(known, number=number, gone=change.gone, draining=not change.gone))


def _known(draft: _Draft, name: WorkerName) -> WorkerEntry:
    known = draft.worker(Worker(name.worker, name.dp_rank))
    if known is None or known.gone:
        raise UnknownWorkerError(f"{_called(name)} is not registered", field="worker")
    return known


def _next(known: WorkerEntry) -> int:
    if known.generation >= limits.GENERATION_MAX:
        raise TooLargeError(f"generation: it is at the limit of {limits.GENERATION_MAX}", field="generation")
    return known.generation + 1


def _called(name: WorkerName) -> str:
    return f"worker: {name.worker!r} rank {name.dp_rank}"


class KeylessChanges:
    """Numbers changes. `run` has to be running."""

    def __init__(
        self, registry: Registry, membership: Membership, spread: Spread, numbered: Callable[[int], None]
    ) -> None:
        self._registry = registry
        self._membership = membership
        self._spread = spread
        self._numbered = numbered
        """Told of each new number of the registry, before it is spread."""
        self._given = 0
        """Highest number ever given. One that could not be kept may be kept all the same: it is not given again."""
        self._keeping = (
            asyncio.Lock()
        )  # the registry and the membership change together; held across the membership only
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(limits.CHANGES_WAITING_MAX)

    async def change(self, change: KeylessChange) -> Changed:
        """Make a change. Once begun it goes on, whether its caller waits for it or not."""
        made: asyncio.Future[Changed] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait(_Waiting(change, made))
        except asyncio.QueueFull:
            raise OverloadedError(f"{limits.CHANGES_WAITING_MAX} changes without a key wait already") from None
        return await made

    async def take_over(self, entries: list[Entry], number: int) -> None:
        """A shard knows later changes than the membership does: keep them."""
        async with self._keeping:
            await self._keep(entries, number)

    async def _keep(self, entries: list[Entry], number: int) -> None:
        await self._membership.put_entries(entries, number)
        self._registry.apply(entries, number)
        self._numbered(self._registry.number)

    async def run(self) -> None:
        """Make changes, for ever."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < limits.CHANGES_A_BATCH:
                batch.append(self._queue.get_nowait())
            try:
                await self._make(batch)
            except StorePoisonedError as error:
                _fail(batch, error)
                raise
            except SarpError as error:
                _fail(batch, error)
            except BaseException:
                for one in batch:
                    one.made.cancel()
                raise

    async def _make(self, batch: list[_Waiting]) -> None:
        decided: list[tuple[_Waiting, Entry]] = []
        async with self._keeping:
            draft = _Draft(self._registry, self._given)
            for one in batch:
                try:
                    decided.append((one, decide(draft, one.change)))
                except SarpError as error:
                    _fail([one], error)
            if not decided:
                return
            if draft.entries:
                self._given = draft.number
                await self._keep(draft.entries, draft.number)
        missing = await self._spread(max(entry.number for _, entry in decided))
        for one, entry in decided:
            if not one.made.done():
                one.made.set_result(Changed(entry, missing))


def _fail(batch: list[_Waiting], error: SarpError) -> None:
    for one in batch:
        if not one.made.done():
            one.made.set_exception(error)
