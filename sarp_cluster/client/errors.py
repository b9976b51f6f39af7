"""What a client's calls raise.

CallError               code, outcome, field, retry_after_ms: what the node said, or what stands for its answer
├── RefusedError        the caller's fault: the same again would be refused again
├── NotNowError         it cannot be done now; again after retry_after_ms
├── UnreachableError    no node answered: `outcome` says whether a change may have been applied all the same
└── DeadlineError       the time was over before the answer was there

All are RemoteError and SarpError. `outcome` is that of a change: not_applied, unknown, or partly_applied; of the last
two the caller sends all again.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from sarp_cluster.errors import TooLargeError
from sarp_cluster.wire.faults import RemoteError, status_of
from sarp_cluster.wire.messages import ErrorBody, Outcome

AGAIN: Final = frozenset({"overloaded", "wrong_shard", "conflict", "epoch_conflict"})
"""Codes with a status of the caller's fault that are none: the same again may well be done."""


class CallError(RemoteError):
    """A call that failed."""

    @property
    def outcome(self) -> Outcome | None:
        """What is known of a change that failed."""
        return self.body.outcome

    @property
    def field(self) -> str | None:
        """The field that was wrong."""
        return self.body.field

    @property
    def retry_after_ms(self) -> int | None:
        """When to try again."""
        return self.body.retry_after_ms


class RefusedError(CallError):
    """The caller's fault: the same again would be refused again."""


class NotNowError(CallError):
    """It cannot be done now."""


class UnreachableError(CallError):
    """No node answered. `sent`: the request may have reached one."""

    def __init__(self, message: str, *, sent: bool, change: bool = False) -> None:
        outcome: Outcome = "unknown" if sent else "not_applied"
        super().__init__(ErrorBody(code="connection_lost", message=message, outcome=outcome if change else None))
        self.sent = sent


class DeadlineError(CallError):
    """The time was over before the answer was there. `sent`: the request may have reached a node."""

    def __init__(self, message: str, *, sent: bool = True, change: bool = False) -> None:
        outcome: Outcome = "unknown" if sent else "not_applied"
        super().__init__(ErrorBody(code="timeout", message=message, outcome=outcome if change else None))


def unsendable(error: Exception, *, change: bool) -> RefusedError:
    """Of a message that cannot be sent at all: over the limit, or with an integer over 64 bits."""
    code = "too_large" if isinstance(error, TooLargeError) else "bad_request"
    outcome: Outcome | None = "not_applied" if change else None
    return RefusedError(ErrorBody(code=code, message=str(error), field="body", outcome=outcome))


def error_of(body: ErrorBody) -> CallError:
    """The error that a node answered with."""
    if body.code in AGAIN or status_of(body) >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return NotNowError(body)
    return RefusedError(body)
