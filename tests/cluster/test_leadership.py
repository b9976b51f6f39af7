"""A coordinator counts its lease itself: it leads no more before another can, however it was held up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator import leadership
from coordinator.leadership import Leadership
from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import Records
from sarp_cluster.errors import MembershipError, RecordsRejectedError
from tests.golden.record_files import Memory

LEAD_S = 0.2


class Told(EmbeddedMembership):
    """Says what the test wants."""

    leads: bool | None = True
    """None: it does not answer."""
    refused: MembershipError | None = None
    """Of the next reading."""
    resigned = 0
    discarded = 0

    async def lead(self, coordinator: str) -> bool:
        if self.leads is None:
            await asyncio.get_running_loop().create_future()
        return bool(self.leads)

    async def load(self) -> Records:
        if self.refused is not None:
            refused, self.refused = self.refused, None
            raise refused
        return await super().load()

    async def discard(self) -> None:
        self.discarded += 1
        await super().discard()

    async def resign(self) -> None:
        self.resigned += 1


class Terms:
    """The terms, and a coordinator that leads them."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended_at: list[float] = []
        self.notes: list[str] = []
        self.leadership = Leadership("one", self.serve, lambda kind, _: self.notes.append(kind))

    async def serve(self, _: Records) -> None:
        self.begun += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended_at.append(asyncio.get_running_loop().time())

    async def until(self, condition: object) -> None:
        assert callable(condition)
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def led(membership: Told, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Terms]:
    monkeypatch.setattr(leadership, "LEAD_S", LEAD_S)
    monkeypatch.setattr(leadership, "RENEW_S", LEAD_S / 4)
    terms = Terms()
    running = asyncio.create_task(terms.leadership.run(membership))
    try:
        yield terms
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def told() -> Told:
    membership = await Told.open(Memory())
    assert isinstance(membership, Told)
    return membership


async def test_without_an_answer_the_term_ends_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = await told()
    async with led(membership, monkeypatch) as terms:
        await terms.until(lambda: terms.begun)
        asked_no_more_at = asyncio.get_running_loop().time()
        membership.leads = None
        assert terms.leadership.holds
        await terms.until(lambda: terms.ended_at)
        assert not terms.leadership.holds
        assert terms.ended_at[0] - asked_no_more_at < 2 * LEAD_S


@pytest.mark.parametrize("another", [False, True])
async def test_held_up_for_too_long_it_does_not_lead_before_it_has_asked(
    monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    membership = await told()
    async with led(membership, monkeypatch) as terms:
        await terms.until(lambda: terms.begun)
        assert terms.leadership.holds
        membership.leads = None
        time.sleep(2 * LEAD_S)  # noqa: ASYNC251  # as a process that is stopped
        assert not terms.leadership.holds
        membership.leads = not another
        if another:
            await terms.until(lambda: terms.ended_at)
            assert not terms.leadership.holds
        else:  # nobody led meanwhile: the term goes on
            await terms.until(lambda: terms.leadership.holds)
            assert (terms.begun, terms.ended_at) == (1, [])


async def test_rejected_records_are_dropped_and_people_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = await told()
    membership.refused = RecordsRejectedError("forged")
    async with led(membership, monkeypatch) as terms:
        await terms.until(lambda: terms.begun)
        assert (terms.notes, membership.discarded) == (["records_rejected"], 1)


async def test_records_that_it_cannot_read_are_left_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = await told()
    membership.refused = MembershipError("of a newer program")
    async with led(membership, monkeypatch) as terms:
        await terms.until(lambda: membership.resigned)
        assert (terms.begun, terms.notes, membership.discarded) == (0, [], 0)
        assert not terms.leadership.holds
        await terms.until(lambda: terms.begun)  # it tries again
