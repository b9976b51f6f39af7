"""Leases: counted from when the renewal was sent, never shortened by a late answer, a margin kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.cluster.leases import Lease

TIMES = st.floats(0, 1e6)


def test_there_is_none_at_first() -> None:
    lease = Lease()
    assert not lease.valid(0.0)
    assert lease.left_s(0.0) == 0


def test_it_is_counted_from_when_the_renewal_was_sent() -> None:
    lease = Lease(margin_s=5)
    lease.renewed(sent_at=100, ttl_s=60)  # the answer may have come at 150
    assert lease.valid(154.9)
    assert not lease.valid(155)
    assert lease.left_s(150) == pytest.approx(5)
    assert lease.left_s(1_000) == 0


@given(st.lists(TIMES, min_size=1, max_size=8), TIMES)
def test_answers_in_any_order_leave_the_longest(sent: list[float], now: float) -> None:
    lease = Lease(margin_s=5)
    for at in sent:
        lease.renewed(at, 60)
    assert lease.valid(now) == (now < max(sent) + 60 - 5)
    assert lease.valid(now) == (lease.left_s(now) > 0)


def test_one_that_was_taken_away_is_gone_until_it_is_granted_again() -> None:
    lease = Lease(margin_s=5)
    lease.renewed(0, 60)
    lease.end()
    assert not lease.valid(0)
    lease.renewed(10, 60)
    assert lease.valid(64)


@given(st.integers(0, limits.LEASE_MS), TIMES)
def test_its_holder_sees_it_end_before_whoever_granted_it(late_ms: int, sent: float) -> None:
    """Who grants counts from when the heartbeat came, which is later than when it was sent."""
    lease = Lease()
    lease.renewed(sent, limits.LEASE_MS / 1000)
    granted_until = sent + late_ms / 1000 + limits.LEASE_MS / 1000
    assert not lease.valid(granted_until)
