"""Every error this project raises on purpose.

SarpError
├── RequestError               the caller's fault: the request is refused and nothing has changed
│   ├── BadRequestError        a field is missing, malformed or out of range
│   ├── TooLargeError          a field is over its bound in `limits`
│   ├── UnknownNamespaceError  the namespace was never created
│   ├── UnknownPrefixError     an insert from an offset whose prefix is not in the index: send it from position 0
│   ├── StaleGenerationError   the worker's generation is older than the one known
│   ├── UnauthenticatedError   no credential, or one that is not known
│   ├── ForbiddenError         the credential has not the scope, the tenant or the worker
│   ├── UnknownWorkerError     the worker was never registered
│   ├── ExistsError            something else has that name already
│   └── WrongShardError        the shard does not own the sequence: fetch the slot map, ask its owner
├── UnavailableError           this node cannot do it now, another or later can: nothing was applied
│   ├── RecoveringError        the shard has not caught up yet
│   ├── NoLeaseError           the shard may not acknowledge changes now
│   ├── DrainingError          the node is about to end
│   ├── OverloadedError        too much is waiting already
│   └── NotLeaderError         another coordinator leads
├── OutcomeError               a change that was sent and not answered in time: it may have been applied
├── IncompleteError            a change without a key that some serving shards do not have yet: ask again
├── ConnectionLostError        the peer is not there, or does not speak as it should
├── EpochConflictError         two slot maps of the same number, or not the one expected
├── MembershipError            the records of the coordinators cannot be read or written
│   └── RecordsRejectedError   they are not what we wrote: damaged, forged, or mixed of old and new
├── ConflictError              the index changed each time an insert was about to commit: try again
├── StorageError               the segment store
│   ├── StoreFullError         no space: nothing new is taken until there is some again, matches go on
│   ├── StorePoisonedError     a write or sync failed: nothing is acknowledged any more, the process has to end
│   └── CorruptRecordError     a record that does not verify (file, offset, reason)
├── TraceError                 a trace file that cannot be read
├── DumpError                  a dump that cannot be loaded (line, field, reason)
└── InvariantViolationError    a bug: the node stops
"""

from __future__ import annotations


class SarpError(Exception):
    """Root of all errors raised on purpose."""


class RequestError(SarpError):
    """The caller's fault. `field` names what was wrong; the index is unchanged."""

    code = "bad_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadRequestError(RequestError, ValueError):
    """A field is missing, malformed or out of range."""


class TooLargeError(RequestError, ValueError):
    """A field is over its bound."""

    code = "too_large"


class UnknownNamespaceError(RequestError, LookupError):
    """The namespace was never created in this index."""

    code = "unknown_namespace"


class UnknownPrefixError(RequestError, LookupError):
    """An insert from an offset whose prefix is not in the index. Send the block IDs from position 0."""

    code = "unknown_prefix"


class StaleGenerationError(RequestError):
    """The worker's generation is older than the one known: its cache was cleared since."""

    code = "stale_generation"


class UnauthenticatedError(RequestError):
    """No credential, or one that is not known."""

    code = "unauthenticated"


class ForbiddenError(RequestError):
    """The credential has not the scope, the tenant or the worker."""

    code = "forbidden"


class UnknownWorkerError(RequestError, LookupError):
    """The worker was never registered, or was deregistered."""

    code = "unknown_worker"


class ExistsError(RequestError):
    """Something else has that name already."""

    code = "exists"


class WrongShardError(RequestError):
    """The shard does not own the sequence, or not all of it, under its slot map, whose epoch is `epoch`."""

    code = "wrong_shard"

    def __init__(self, message: str, *, epoch: int, number: int = 0) -> None:
        super().__init__(message, field="block_ids")
        self.epoch = epoch
        self.number = number


class UnavailableError(SarpError):
    """This node cannot do it now: another one can, or this one later. Nothing was applied."""

    code = "unavailable"

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RecoveringError(UnavailableError):
    """The shard has not caught up yet."""

    code = "recovering"


class NoLeaseError(UnavailableError):
    """The shard may not acknowledge changes now."""

    code = "no_lease"


class DrainingError(UnavailableError):
    """The node is about to end."""

    code = "draining"


class OverloadedError(UnavailableError):
    """Too much is waiting already."""

    code = "overloaded"


class NotLeaderError(UnavailableError):
    """Another coordinator leads."""

    code = "not_leader"


class OutcomeError(SarpError):
    """A change that was sent and not answered in time: `outcome` says what is known of it."""

    def __init__(self, message: str, *, outcome: str, code: str = "timeout", retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.code = code
        self.retry_after_ms = retry_after_ms


class IncompleteError(SarpError):
    """A change without a key that is made, and that the shards `missing` do not have durably yet. Ask again."""

    code = "incomplete"

    def __init__(self, message: str, *, missing: list[str]) -> None:
        super().__init__(message)
        self.missing = missing


class ConnectionLostError(SarpError):
    """The peer is not there, or does not speak as it should."""

    code = "connection_lost"


class EpochConflictError(SarpError):
    """Two slot maps of the same number, or not the one that was expected."""

    code = "epoch_conflict"


class MembershipError(SarpError):
    """The records of the coordinators cannot be read or written."""

    code = "membership"


class RecordsRejectedError(MembershipError):
    """The records of the coordinators are not what one of them wrote: damaged, forged, or mixed of old and new."""


class ConflictError(SarpError):
    """The index changed each time the insert was about to commit. Nothing was applied; try again."""


class StorageError(SarpError):
    """The segment store failed."""


class StoreFullError(StorageError):
    """The disk is full. Nothing new is taken; the store goes on by itself once there is space. Matches go on."""

    code = "disk_full"


class StorePoisonedError(StorageError):
    """A write or a sync failed, and what the kernel still holds is not known.

    Nothing is acknowledged any more and nothing is tried again: end the process and recover from the disk.
    """


class CorruptRecordError(StorageError):
    """A record that does not verify. The message names file, offset and reason."""


class SnapshotDamagedError(CorruptRecordError):
    """A snapshot that is not what it should be. An older one, or the log, has the same and more.

    The process has to open the store again; `run` is the number of the run file that is damaged, if it is that.
    """

    def __init__(self, message: str, run: int | None = None) -> None:
        super().__init__(message)
        self.run = run


class TraceError(SarpError, ValueError):
    """A trace file that cannot be read."""


class DumpError(SarpError, ValueError):
    """A dump that cannot be loaded. The message names line and field."""


class InvariantViolationError(SarpError):
    """A bug. Continuing could give a wrong answer, so the node stops."""


def invariant(condition: object, message: str, **context: object) -> None:
    """Raise InvariantViolationError unless `condition` holds. Unlike `assert` it survives `python -O`."""
    if not condition:
        details = ", ".join(f"{name}={value!r}" for name, value in context.items())
        raise InvariantViolationError(f"{message} ({details})" if details else message)
