"""Failover and the retry budget, on transports that answer from a list."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.client.attempts import Attempts, RetryBudget
from sarp_cluster.client.errors import (
    CallError,
    DeadlineError,
    NotNowError,
    RefusedError,
    UnreachableError,
    error_of,
)
from sarp_cluster.client.transport import Address, parse_addresses
from sarp_cluster.errors import BadRequestError, TooLargeError
from sarp_cluster.wire import messages, planning
from sarp_cluster.wire.faults import STATUS
from sarp_cluster.wire.operations import Operation

MATCH = messages.MatchRequest(namespace="n", block_ids=b"", deadline_ms=50)
INSERT = messages.InsertRequest(namespace="n", block_ids=bytes(8), worker="w")
NOTHING = planning.nothing(None, 1)

busy = error_of(messages.ErrorBody(code="overloaded", message=""))
refused = error_of(messages.ErrorBody(code="bad_request", message=""))


class Node:
    """A transport. Its next answers: replies, or errors to raise."""

    def __init__(self, *answers: Any, otherwise: Any = NOTHING) -> None:
        self.address = "node"
        self.answers = list(answers)
        self.otherwise = otherwise
        self.asked: list[messages.Request] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ask(self, operation: Operation, message: messages.Request, timeout_s: float) -> Any:
        self.asked.append(message)
        answer = self.answers.pop(0) if self.answers else self.otherwise
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = NOTHING
        if isinstance(answer, CallError):
            raise answer
        return answer


def lost(*, sent: bool) -> UnreachableError:
    return UnreachableError("", sent=sent)


@pytest.mark.parametrize("error", [busy, lost(sent=True), lost(sent=False)])
async def test_a_match_is_tried_once_more_on_another_router(error: CallError) -> None:
    first, second = Node(error), Node()
    attempts = Attempts([first, second], RetryBudget())
    assert await attempts.ask("match", MATCH, 1_000) is NOTHING
    assert (len(first.asked), len(second.asked)) == (1, 1)
    # The one that answered is asked from then on.
    await attempts.ask("match", MATCH, 1_000)
    assert (len(first.asked), len(second.asked)) == (1, 2)


@pytest.mark.parametrize("error", [busy, lost(sent=True)])
async def test_a_match_is_tried_no_third_time_and_never_twice_on_one_router(error: CallError) -> None:
    nodes = [Node(otherwise=error) for _ in range(4)]
    with pytest.raises(type(error)):
        await Attempts(nodes, RetryBudget()).ask("match", MATCH, 1_000)
    assert [len(node.asked) for node in nodes] == [1, 1, 0, 0]
    alone = Node(otherwise=error)
    with pytest.raises(type(error)):
        await Attempts([alone], RetryBudget()).ask("match", MATCH, 1_000)
    assert len(alone.asked) == 1


async def test_what_was_never_sent_goes_to_each_router_in_turn() -> None:
    nodes = [Node(otherwise=lost(sent=False)) for _ in range(3)]
    budget = RetryBudget()
    with pytest.raises(UnreachableError):
        await Attempts(nodes, budget).ask("insert", INSERT, 1_000)
    assert [len(node.asked) for node in nodes] == [1, 1, 1]
    assert budget.retries == 0


@pytest.mark.parametrize("error", [busy, lost(sent=True), refused])
@pytest.mark.parametrize("name", ["insert", "remove", "batch", "clear_worker", "register_worker"])
async def test_a_change_that_was_sent_is_not_sent_again(name: str, error: CallError) -> None:
    first, second = Node(error), Node()
    with pytest.raises(type(error)):
        await Attempts([first, second], RetryBudget()).ask(name, INSERT, 1_000)
    assert (len(first.asked), len(second.asked)) == (1, 0)


async def test_what_is_refused_is_refused_by_all() -> None:
    first, second = Node(otherwise=refused), Node()
    attempts = Attempts([first, second], RetryBudget())
    for _ in range(2):
        with pytest.raises(RefusedError):
            await attempts.ask("match", MATCH, 1_000)
    assert (len(first.asked), len(second.asked)) == (2, 0)


async def test_a_late_router_is_not_asked_next() -> None:
    first, second = Node(DeadlineError("")), Node()
    attempts = Attempts([first, second], RetryBudget())
    with pytest.raises(DeadlineError):
        await attempts.ask("match", MATCH, 1_000)
    await attempts.ask("match", MATCH, 1_000)
    assert (len(first.asked), len(second.asked)) == (1, 1)


async def test_retries_come_out_of_the_deadline() -> None:
    def lose() -> CallError:
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.02
        while loop.time() < end:  # the time that the first one takes
            pass
        return busy

    class Slow(Node):
        async def ask(self, operation: Operation, message: messages.Request, timeout_s: float) -> Any:
            self.asked.append(message)
            raise lose()

    first, second = Slow(), Node()
    with pytest.raises(DeadlineError):
        await Attempts([first, second], RetryBudget()).ask("match", MATCH, 10)
    assert second.asked == []
    first, second = Slow(), Node()
    await Attempts([first, second], RetryBudget()).ask("match", MATCH, 50)
    told = [one.deadline_ms for node in (first, second) for one in node.asked if isinstance(one, messages.MatchRequest)]
    assert told[0] <= 45
    assert told[1] < 30


@given(st.lists(st.booleans(), max_size=500))
def test_retries_add_at_most_a_tenth_and_a_few(wanted: list[bool]) -> None:
    budget = RetryBudget()
    for retry in wanted:
        budget.request()
        if retry:
            budget.take()
        assert budget.retries <= limits.RETRIES_SAVED_MAX + limits.RETRIES_A_REQUEST * budget.requests + 1e-6


async def test_a_budget_that_is_spent_ends_retries() -> None:
    budget = RetryBudget()
    first, second = Node(otherwise=busy), Node(otherwise=busy)
    attempts = Attempts([first, second], budget)
    for _ in range(100):
        with pytest.raises(NotNowError):
            await attempts.ask("match", MATCH, 1_000)
    assert budget.requests == 100
    assert len(first.asked) + len(second.asked) - 100 == budget.retries
    assert 10 <= budget.retries <= 20


def test_every_code_is_the_callers_fault_or_worth_another_try() -> None:
    again = {code for code in STATUS if isinstance(error_of(messages.ErrorBody(code=code, message="")), NotNowError)}
    refused = set(STATUS) - again
    assert refused == {
        "bad_request",
        "unauthenticated",
        "forbidden",
        "not_found",
        "unknown_namespace",
        "unknown_worker",
        "unknown_prefix",
        "method_not_allowed",
        "stale_generation",
        "exists",
        "too_large",
        "unsupported_media",
    }


def test_addresses_are_read() -> None:
    assert parse_addresses(" http://a:1, sarp://[::1]:2 ,") == [Address("http", "a", 1), Address("sarp", "::1", 2)]
    assert parse_addresses("https://a:1,sarps://b:2") == [Address("https", "a", 1), Address("sarps", "b", 2)]
    assert str(parse_addresses("sarp://[::1]:2")[0]) == "sarp://[::1]:2"


NO_ADDRESSES = """, 127.0.0.1:7100 ftp://a:1 http://a http://a:x http://a:99999 http://:1 http://u:p@a:1 http://a:1/path
http://a:1?q http://a:1#f sarp:// http://[::1:2 http://a:1,https://b:2"""


@pytest.mark.parametrize("text", ["", *NO_ADDRESSES.split()])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_addresses(text)
    assert caught.value.field == "url"


def test_a_token_does_not_go_in_clear_to_one_of_several() -> None:
    for text in ("http://a:1,https://b:2", "sarp://a:1,sarps://b:2", "https://a:1,sarp://b:2"):
        with pytest.raises(BadRequestError):
            parse_addresses(text)


def test_too_many_addresses_are_refused() -> None:
    with pytest.raises(TooLargeError):
        parse_addresses(",".join(["http://a:1"] * (limits.ADDRESSES_MAX + 1)))
