"""Changes without a key: checked, numbered, kept before they are spread, in order; the same again changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.keyless import Changed, KeylessChanges
from sarp_cluster import limits
from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.errors import (
    BadRequestError,
    ExistsError,
    ForbiddenError,
    MembershipError,
    OverloadedError,
    SarpError,
    StaleGenerationError,
    StorePoisonedError,
    TooLargeError,
    UnknownWorkerError,
)
from sarp_cluster.types import HashProfile, NamespaceSpec
from sarp_cluster.wire.control import ClearWorker, KeylessChange, NewNamespace, NewWorker, PurgeTenant, RetireWorker
from sarp_cluster.wire.messages import WorkerName
from tests.crash.virtual_time import run
from tests.golden.record_files import Memory


def namespace(name: str = "n", *, model: str = "m", block_size: int = 16, profile: str = "xxh3") -> NewNamespace:
    return NewNamespace(id=name, tenant="t", model=model, lora="", salt="", block_size=block_size, hash_profile=profile)


def register(worker: str = "w", *, owner: str = "me", ttl_ms: int = 0) -> NewWorker:
    return NewWorker(worker=WorkerName(worker=worker), owner=owner, heartbeat_ttl_ms=ttl_ms)


def clear(worker: str = "w", generation: int | None = None) -> ClearWorker:
    return ClearWorker(worker=WorkerName(worker=worker), generation=generation)


def retire(worker: str = "w", *, gone: bool) -> RetireWorker:
    return RetireWorker(worker=WorkerName(worker=worker), gone=gone)


class Store(Memory):
    """Counts writes, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.failure: Exception | None = None

    async def write(self, content: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.writes += 1
        await super().write(content)


class Cluster:
    """A membership in memory, shards that always have everything but for some, and what was done in which order."""

    def __init__(self) -> None:
        self.store = Store()
        self.registry = Registry()
        self.spread: list[tuple[int, int]] = []
        """(number that was asked for, number that was kept by then)"""
        self.numbered: list[int] = []
        self.missing: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.membership: EmbeddedMembership
        self.changes: KeylessChanges

    async def _spread(self, number: int) -> list[str]:
        kept = await EmbeddedMembership.open(Memory(self.store.content))
        self.spread.append((number, (await kept.load()).number))
        await self.go_on.wait()
        return self.missing

    async def change(self, change: KeylessChange) -> Entry:
        return (await self.changes.change(change)).entry

    async def validate(self) -> None:
        self.registry.validate()
        records = await self.membership.load()
        assert (records.entries, records.number) == (self.registry.entries(), self.registry.number)
        assert all(asked <= kept for asked, kept in self.spread), "spread before it was kept"
        assert self.numbered == sorted(self.numbered)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    one = Cluster()
    one.membership = await EmbeddedMembership.open(one.store)
    one.changes = KeylessChanges(one.registry, one.membership, one._spread, one.numbered.append)
    running = asyncio.create_task(one.changes.run())
    try:
        yield one
        await one.validate()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_change_is_numbered_kept_and_spread() -> None:
    async with cluster() as one:
        spec = NamespaceSpec(tenant="t", model="m", hash_profile=HashProfile.XXH3)
        assert await one.change(namespace()) == NamespaceEntry(1, "n", spec)
        assert await one.change(register()) == WorkerEntry(2, "w", 0, "me")
        assert await one.change(PurgeTenant(tenant="t")) == TenantEntry(3, "t", 1)
        assert await one.change(PurgeTenant(tenant="t")) == TenantEntry(4, "t", 2)
        assert one.spread == [(1, 1), (2, 2), (3, 3), (4, 4)]
        assert one.numbered == [1, 2, 3, 4]


async def test_the_same_again_is_the_same_entry_and_waits_for_the_shards_again() -> None:
    async with cluster() as one:
        for change in (namespace(), register(ttl_ms=500)):
            one.missing = ["s1"]
            first = await one.changes.change(change)
            one.missing = []
            assert await one.changes.change(change) == Changed(first.entry, [])
            assert first.missing == ["s1"]
        assert one.spread == [(1, 1), (1, 1), (2, 2), (2, 2)]
        assert one.store.writes == 2


async def test_another_namespace_under_the_same_id_is_refused() -> None:
    async with cluster() as one:
        await one.change(namespace())
        for other in (namespace(model="other"), namespace(block_size=32), namespace(profile="opaque")):
            with pytest.raises(ExistsError, match="is another one"):
                await one.change(other)


@pytest.mark.parametrize("change", [namespace(profile="md5"), namespace(block_size=0), namespace(block_size=10**6)])
async def test_a_namespace_that_makes_no_sense_is_refused(change: NewNamespace) -> None:
    async with cluster() as one:
        with pytest.raises(BadRequestError):
            await one.change(change)


async def test_a_worker_belongs_to_whoever_registered_it() -> None:
    async with cluster() as one:
        await one.change(register())
        for gone in (False, True):
            if gone:
                await one.change(retire(gone=True))
            with pytest.raises(ForbiddenError, match="another credential"):
                await one.change(register(owner="somebody else"))


async def test_a_worker_that_comes_back_begins_the_next_generation() -> None:
    async with cluster() as one:
        await one.change(register())
        await one.change(clear(generation=7))
        assert await one.change(retire(gone=True)) == WorkerEntry(3, "w", 0, "me", 7, gone=True)
        assert await one.change(retire(gone=True)) == WorkerEntry(3, "w", 0, "me", 7, gone=True)
        with pytest.raises(UnknownWorkerError):
            await one.change(clear())
        with pytest.raises(UnknownWorkerError):
            await one.change(retire(gone=False))
        assert await one.change(register(ttl_ms=9)) == WorkerEntry(4, "w", 0, "me", 8, 9)


async def test_one_that_drains_and_registers_again_has_what_it_had() -> None:
    async with cluster() as one:
        await one.change(register())
        assert await one.change(retire(gone=False)) == WorkerEntry(2, "w", 0, "me", draining=True)
        assert await one.change(retire(gone=False)) == WorkerEntry(2, "w", 0, "me", draining=True)
        assert await one.change(register()) == WorkerEntry(3, "w", 0, "me")


async def test_generations_only_grow() -> None:
    async with cluster() as one:
        with pytest.raises(UnknownWorkerError):
            await one.change(clear())
        await one.change(register())
        assert await one.change(clear()) == WorkerEntry(2, "w", 0, "me", 1)
        assert await one.change(clear(generation=5)) == WorkerEntry(3, "w", 0, "me", 5)
        assert await one.change(clear(generation=5)) == WorkerEntry(3, "w", 0, "me", 5)
        for generation in (0, 4):
            with pytest.raises(StaleGenerationError, match="in generation 5 already"):
                await one.change(clear(generation=generation))
        await one.change(clear(generation=limits.GENERATION_MAX))
        with pytest.raises(TooLargeError):
            await one.change(clear())


async def test_a_clear_that_is_asked_for_again_is_answered_once_every_shard_has_it() -> None:
    """Its first answer may have been lost, or have named a shard."""
    async with cluster() as one:
        await one.change(register())
        one.missing = ["s1"]
        assert (await one.changes.change(clear(generation=4))).missing == ["s1"]
        assert await one.changes.change(clear(generation=4)) == Changed(WorkerEntry(2, "w", 0, "me", 4), ["s1"])
        one.missing = []
        assert await one.changes.change(clear(generation=4)) == Changed(WorkerEntry(2, "w", 0, "me", 4), [])
        assert one.spread == [(1, 1), (2, 2), (2, 2), (2, 2)]


async def test_ranks_are_different_workers() -> None:
    async with cluster() as one:
        await one.change(register())
        other = NewWorker(worker=WorkerName(worker="w", dp_rank=1), owner="somebody else", heartbeat_ttl_ms=0)
        assert await one.change(other) == WorkerEntry(2, "w", 1, "somebody else")


@pytest.mark.parametrize(("limit", "changes"), [("WORKERS_MAX", register), ("NAMESPACES_MAX", namespace)])
async def test_there_is_a_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str, changes: Callable[[str], KeylessChange]
) -> None:
    monkeypatch.setattr(limits, limit, 2)
    async with cluster() as one:
        await one.change(changes("a"))
        await one.change(changes("b"))
        await one.change(changes("a"))
        with pytest.raises(TooLargeError, match="the limit is 2"):
            await one.change(changes("c"))


async def test_changes_that_wait_are_made_together_in_their_order() -> None:
    async with cluster() as one:
        one.go_on.clear()
        first = asyncio.create_task(one.change(register("first")))
        while not one.spread:
            await asyncio.sleep(0)
        waiting = [
            asyncio.create_task(one.change(change))
            for change in (
                register(),
                clear(),
                clear(),
                register(owner="not mine"),
                clear(generation=1),
                clear("first"),
            )
        ]
        await asyncio.sleep(0)
        one.go_on.set()
        assert (await first).number == 1
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert results[:3] == [WorkerEntry(2 + n, "w", 0, "me", n) for n in range(3)]
        assert isinstance(results[3], ForbiddenError)
        assert isinstance(results[4], StaleGenerationError)
        assert results[5] == WorkerEntry(5, "first", 0, "me", 1)
        assert one.spread == [(1, 1), (5, 5)]
        assert one.store.writes == 2


async def test_what_could_not_be_kept_is_not_spread_and_its_number_not_given_again() -> None:
    """It may have been kept all the same, where the backend did not answer in time."""
    async with cluster() as one:
        one.store.failure = OSError("no space")
        with pytest.raises(MembershipError, match="no space"):
            await one.change(register())
        assert (one.spread, one.numbered, len(one.registry)) == ([], [], 0)
        one.store.failure = None
        assert (await one.change(register())).number == 2


async def test_a_store_that_is_poisoned_ends_it() -> None:
    one = Cluster()
    one.membership = await EmbeddedMembership.open(one.store)
    changes = KeylessChanges(one.registry, one.membership, one._spread, one.numbered.append)
    running = asyncio.create_task(changes.run())
    one.store.failure = StorePoisonedError("a sync failed")
    with pytest.raises(StorePoisonedError):
        await changes.change(register())
    with pytest.raises(StorePoisonedError):
        await running


async def test_who_goes_away_does_not_stop_the_change() -> None:
    async with cluster() as one:
        one.go_on.clear()
        asking = asyncio.create_task(one.change(register()))
        while not one.spread:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        one.go_on.set()
        assert (await one.change(register())).number == 1


async def test_too_many_at_once_are_refused() -> None:
    async with cluster() as one:
        one.go_on.clear()
        tasks = [asyncio.create_task(one.change(register(str(n)))) for n in range(limits.CHANGES_WAITING_MAX + 300)]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        one.go_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in results if isinstance(one, OverloadedError)]
        assert len(refused) == len([one for one in results if isinstance(one, BaseException)]) > 0


CHANGES = st.one_of(
    st.builds(namespace, st.sampled_from("ab"), model=st.sampled_from("mn")),
    st.builds(register, st.sampled_from("vw"), owner=st.sampled_from(["me", "you"]), ttl_ms=st.integers(0, 1)),
    st.builds(clear, st.sampled_from("vw"), st.none() | st.integers(0, 5)),
    st.builds(retire, st.sampled_from("vw"), gone=st.booleans()),
    st.builds(PurgeTenant, tenant=st.sampled_from("tu")),
)


@given(st.lists(st.lists(CHANGES, max_size=5), max_size=6))
def test_made_together_or_one_by_one_they_come_to_the_same(batches: list[list[KeylessChange]]) -> None:
    async def work(together: bool) -> tuple[list[object], list[Entry]]:
        results: list[object] = []
        async with cluster() as one:
            for batch in batches:
                if together:
                    results += await asyncio.gather(*map(one.change, batch), return_exceptions=True)
                else:
                    for change in batch:
                        results += await asyncio.gather(one.change(change), return_exceptions=True)
            entries = one.registry.entries()
        return [type(one) if isinstance(one, SarpError) else one for one in results], entries

    assert run(lambda: work(True)) == run(lambda: work(False))
