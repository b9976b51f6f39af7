"""Which router is asked, how often, and when no longer: failover and the retry budget (design §3).

What repeats nothing else repeats: a match or a look at something is tried once more, on another router, if the budget
allows; a change is not, unless it never left. (A writer repeats changes: sarp_cluster.client.writer.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from sarp_cluster import limits
from sarp_cluster.client.errors import CallError, DeadlineError, NotNowError, UnreachableError
from sarp_cluster.client.transport import Transport, timed
from sarp_cluster.errors import invariant
from sarp_cluster.wire import messages
from sarp_cluster.wire.operations import OPERATIONS, Operation

REPEATABLE: Final = frozenset(
    {"match", "heartbeat", "list_namespaces", "list_workers", "cluster", "slots", "events"},
)
"""Operations that are tried a second time: they change nothing, or nothing more."""


class RetryBudget:
    """How many retries there may be: a share of the requests, and a few at once."""

    def __init__(self, share: float = limits.RETRIES_A_REQUEST, saved_max: float = limits.RETRIES_SAVED_MAX) -> None:
        self._share = share
        self._saved_max = saved_max
        self._left = saved_max
        self.requests = 0
        self.retries = 0

    def request(self) -> None:
        """A request is sent for the first time."""
        self.requests += 1
        self._left = min(self._saved_max, self._left + self._share)

    def take(self) -> bool:
        """May one be sent again?"""
        if self._left < 1:
            return False
        self._left -= 1
        self.retries += 1
        return True


class Attempts:
    """Asks one of several routers that are all the same: the one that answered last, until it does not."""

    def __init__(self, transports: Sequence[Transport], budget: RetryBudget) -> None:
        invariant(transports, "a client has no address")
        self._transports = list(transports)
        self._budget = budget
        self._at = 0

    async def open(self) -> None:
        """Begin."""
        for transport in self._transports:
            await transport.open()

    async def close(self) -> None:
        """Let go of all connections."""
        await asyncio.gather(*(transport.close() for transport in self._transports))

    async def ask(self, name: str, message: messages.Request, deadline_ms: int, *, again: bool = False) -> Any:  # noqa: ANN401  # the reply of the operation
        """The reply, of the operation's type, within the deadline. Raises a CallError.

        `again`: this is a retry already, whose budget was taken.
        """
        operation = OPERATIONS[name]
        loop = asyncio.get_running_loop()
        ends = loop.time() + deadline_ms / 1000
        if not again:
            self._budget.request()
        repeats = name in REPEATABLE
        untried = len(self._transports)
        while True:
            left_s = ends - loop.time()
            try:
                if left_s <= 0:
                    raise DeadlineError(f"{name}: the deadline of {deadline_ms} ms is over", change=operation.change)
                untried -= 1
                return await self._ask_one(operation, message, left_s)
            except UnreachableError as error:
                if untried and not error.sent:
                    continue  # nothing was asked yet, so this is no retry
                if not (repeats and untried and self._budget.take()):
                    raise
            except NotNowError:
                if not (repeats and untried and self._budget.take()):
                    raise
            repeats = False

    async def _ask_one(self, operation: Operation, message: messages.Request, left_s: float) -> Any:  # noqa: ANN401
        at = self._at
        try:
            return await self._transports[at].ask(operation, timed(message, left_s), left_s)
        except CallError as error:
            # The next call, too, asks another one: whether this one is down, late or busy. What it refuses all refuse.
            if isinstance(error, UnreachableError | NotNowError | DeadlineError) and self._at == at:
                self._at = (at + 1) % len(self._transports)
            raise
