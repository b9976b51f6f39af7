"""Errors on the wire: which code and HTTP status each has, and which exception a code becomes again."""

from __future__ import annotations

from typing import Final

from sarp_cluster import errors
from sarp_cluster.errors import SarpError
from sarp_cluster.wire.messages import ErrorBody, ErrorReply, Outcome

STATUS: Final = {
    "bad_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "unknown_namespace": 404,
    "unknown_worker": 404,
    "unknown_prefix": 404,
    "method_not_allowed": 405,
    "stale_generation": 409,
    "exists": 409,
    "conflict": 409,
    "epoch_conflict": 409,
    "too_large": 413,
    "unsupported_media": 415,
    "wrong_shard": 421,
    "overloaded": 429,
    "internal": 500,
    "timeout": 503,
    "unavailable": 503,
    "recovering": 503,
    "no_lease": 503,
    "draining": 503,
    "shard_down": 503,
    "not_leader": 503,
    "incomplete": 503,
    "membership": 503,
    "poisoned": 503,
    "quarantined": 503,
    "disk_full": 507,
}
"""Every code there is, with its HTTP status. Codes are stable: a client may act on them."""

RETRY_AFTER_MS: Final = 200
"""What is said where the error does not know better and trying again makes sense."""


class RemoteError(SarpError):
    """What a node answered instead of a reply. `body` has the code and what else it said."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(f"{body.code}: {body.message}")
        self.body = body

    @property
    def code(self) -> str:
        """The stable code."""
        return self.body.code


def describe(error: Exception, *, change: bool = False) -> ErrorBody:
    """What is told of an error. `change`: the request was one, so the outcome is told, too.

    An exception that nobody expected is told as `internal` and nothing else: its text is for our log, not for callers.
    """
    match error:
        case RemoteError():
            return error.body
        case errors.WrongShardError():
            body = ErrorBody(code=error.code, message=str(error), field=error.field, epoch=error.epoch)
        case errors.RequestError():
            body = ErrorBody(code=error.code, message=str(error), field=error.field)
        case errors.OutcomeError():
            body = ErrorBody(code=error.code, message=str(error), retry_after_ms=error.retry_after_ms or RETRY_AFTER_MS)
            body.outcome = _outcome(error.outcome)
            return body
        case errors.UnavailableError():
            body = ErrorBody(code=error.code, message=str(error), retry_after_ms=error.retry_after_ms or RETRY_AFTER_MS)
        case errors.IncompleteError():
            body = ErrorBody(code=error.code, message=str(error), retry_after_ms=RETRY_AFTER_MS, missing=error.missing)
            body.outcome = "partly_applied"
            return body
        case errors.ConflictError():
            body = ErrorBody(code="conflict", message=str(error), retry_after_ms=RETRY_AFTER_MS)
        case errors.StoreFullError():
            body = ErrorBody(code="disk_full", message="the shard's disk is full; matches go on", retry_after_ms=1_000)
        case errors.StorePoisonedError():
            body = ErrorBody(code="poisoned", message="the shard's disk failed: it is about to restart")
            body.retry_after_ms, body.outcome = RETRY_AFTER_MS, "unknown" if change else None
            return body
        case errors.CorruptRecordError():
            body = ErrorBody(code="quarantined", message="a segment that the change needs is damaged")
        case errors.MembershipError() | errors.EpochConflictError():
            body = ErrorBody(code=error.code, message=str(error), retry_after_ms=RETRY_AFTER_MS)
        case _:
            body = ErrorBody(code="internal", message="an error of this node; its log says more")
            body.outcome = "unknown" if change else None
            return body
    if change:
        # What was not kept as far as we know may be kept all the same, and found by the coordinator that leads next.
        body.outcome = "unknown" if isinstance(error, errors.MembershipError) else "not_applied"
    return body


def _outcome(outcome: str) -> Outcome:
    return "partly_applied" if outcome == "partly_applied" else "unknown" if outcome == "unknown" else "not_applied"


def reply_for(error: Exception, *, change: bool = False) -> ErrorReply:
    """The reply that tells of an error."""
    return ErrorReply(error=describe(error, change=change))


def status_of(body: ErrorBody) -> int:
    """HTTP status of an error."""
    return STATUS.get(body.code, 500)
