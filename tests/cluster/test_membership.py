"""Membership, whatever keeps the records: what was put is there, also for the next coordinator; one map at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sarp_cluster.cluster.membership import Membership, Records, ShardRecord
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.errors import EpochConflictError
from sarp_cluster.types import HashProfile, NamespaceSpec
from tests.cluster.membership_backends import BACKENDS, Backend

NONCE = bytes(range(NONCE_BYTES))
OTHER = bytes(NONCE_BYTES)
FIRST = SlotMap.first(["a", "b"], NONCE, {5: 64})
ENTRIES: list[Entry] = [
    NamespaceEntry(1, "n", NamespaceSpec(tenant="Zürich", model="m", hash_profile=HashProfile.OPAQUE)),
    WorkerEntry(2, "w", 3, "owner", 4, 5_000, True, True),
    TenantEntry(3, "Zürich", 2),
]


def shard(name: str, incarnation: str = "i") -> ShardRecord:
    return ShardRecord(shard=name, store=f"store-{name}", incarnation=incarnation, http="", stream="127.0.0.1:7000")


@pytest.fixture(params=sorted(BACKENDS))
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with BACKENDS[request.param](tmp_path) as made:
        yield made


@pytest.fixture
async def membership(backend: Backend) -> AsyncIterator[Membership]:
    opened = await backend.open()
    assert await opened.lead("coordinator")
    yield opened
    await opened.close()


async def restarted(membership: Membership, backend: Backend) -> Records:
    """What the next coordinator finds."""
    await membership.close()
    following = await backend.open()
    try:
        assert await following.lead("the next one")
        return await following.load()
    finally:
        await following.close()


async def test_there_is_nothing_at_first(membership: Membership) -> None:
    assert await membership.load() == Records(slot_map=None, number=0, entries=[], shards={})


async def test_what_was_put_is_there_for_the_next_coordinator(membership: Membership, backend: Backend) -> None:
    await membership.put_slot_map(FIRST, expected=None)
    await membership.put_entries(ENTRIES, 7)
    await membership.put_shard(shard("a"))
    await membership.put_shard(shard("b"))
    await membership.put_shard(shard("a", "another"))
    wanted = Records(slot_map=FIRST, number=7, entries=ENTRIES, shards={"a": shard("a", "another"), "b": shard("b")})
    assert await membership.load() == wanted
    assert await restarted(membership, backend) == wanted


async def test_leading_goes_on_when_it_is_asked_for_again(membership: Membership) -> None:
    assert await membership.lead("coordinator")
    await membership.resign()
    assert await membership.lead("coordinator")


async def test_a_map_follows_the_one_expected(membership: Membership) -> None:
    second = FIRST.changed(nonce=OTHER, owners={0: "b"})
    await membership.put_slot_map(FIRST, expected=None)
    await membership.put_slot_map(second, expected=FIRST)
    assert (await membership.load()).slot_map == second


@pytest.mark.parametrize("expected", ["none", "an older one", "another of the same number", "a newer one"])
async def test_a_map_that_follows_another_is_refused_and_changes_nothing(
    membership: Membership, backend: Backend, expected: str
) -> None:
    second = FIRST.changed(nonce=NONCE)
    wrong = {
        "none": None,
        "an older one": FIRST,
        "another of the same number": FIRST.changed(nonce=OTHER),
        "a newer one": second.changed(nonce=NONCE),
    }
    await membership.put_slot_map(FIRST, expected=None)
    await membership.put_slot_map(second, expected=FIRST)
    with pytest.raises(EpochConflictError):
        await membership.put_slot_map(second.changed(nonce=OTHER), expected=wrong[expected])
    assert (await membership.load()).slot_map == second
    assert (await restarted(membership, backend)).slot_map == second


async def test_of_maps_put_at_once_one_wins(membership: Membership) -> None:
    await membership.put_slot_map(FIRST, expected=None)
    candidates = [FIRST.changed(nonce=bytes([number]) * NONCE_BYTES) for number in range(8)]
    results = await asyncio.gather(
        *(membership.put_slot_map(one, expected=FIRST) for one in candidates), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["EpochConflictError"] * 7 + ["NoneType"]
    assert (await membership.load()).slot_map == candidates[results.index(None)]


async def test_entries_come_in_place_of_older_ones_about_the_same_thing(
    membership: Membership, backend: Backend
) -> None:
    await membership.put_entries(ENTRIES, 3)
    await membership.put_entries([WorkerEntry(4, "w", 3, "owner", 5)], 4)
    await membership.put_entries([WorkerEntry(2, "w", 3, "owner", 1)], 2)  # late: it is older
    await membership.put_entries([TenantEntry(5, "t", 1)], 6)
    await membership.put_entries(ENTRIES, 3)
    wanted = Registry([*ENTRIES, WorkerEntry(4, "w", 3, "owner", 5), TenantEntry(5, "t", 1)], 6)
    records = await restarted(membership, backend)
    assert (records.entries, records.number) == (wanted.entries(), 6)


async def test_changes_of_different_records_at_once_lose_none(membership: Membership, backend: Backend) -> None:
    await asyncio.gather(
        membership.put_slot_map(FIRST, expected=None),
        *(membership.put_entries([TenantEntry(number, f"t{number}", 1)], number) for number in range(1, 10)),
        *(membership.put_shard(shard(f"s{number}")) for number in range(9)),
    )
    records = await restarted(membership, backend)
    assert records.slot_map == FIRST
    assert [entry.number for entry in records.entries] == list(range(1, 10))
    assert len(records.shards) == 9


async def test_discarded_records_are_gone_and_new_ones_are_kept(membership: Membership, backend: Backend) -> None:
    await membership.put_slot_map(FIRST, expected=None)
    await membership.put_entries(ENTRIES, 7)
    await membership.put_shard(shard("a"))
    await membership.discard()
    assert await membership.load() == Records(slot_map=None, number=0, entries=[], shards={})
    await membership.put_shard(shard("b"))
    records = await restarted(membership, backend)
    assert records == Records(slot_map=None, number=0, entries=[], shards={"b": shard("b")})


async def test_many_entries_at_once_are_kept_whole(membership: Membership, backend: Backend) -> None:
    entries: list[Entry] = [WorkerEntry(number, f"w{number}", 0, "owner") for number in range(1, 3_000)]
    await membership.put_entries(entries, 3_500)
    records = await restarted(membership, backend)
    assert (records.entries, records.number) == (entries, 3_500)


async def test_what_load_gave_is_the_callers_own(membership: Membership) -> None:
    await membership.put_shard(shard("a"))
    records = await membership.load()
    records.shards.clear()
    records.entries.append(TenantEntry(1, "t", 1))
    assert (await membership.load()).shards == {"a": shard("a")}
    assert (await membership.load()).entries == []
