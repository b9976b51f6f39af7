"""A service: what a node does for each operation, whichever wire it comes by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire.auth import Authenticator, Principal
from sarp_cluster.wire.messages import Reply
from sarp_cluster.wire.operations import OPERATIONS, Operation

Handler: TypeAlias = Callable[[Principal, Any], Awaitable[Reply | msgspec.Raw]]
"""(who asks, the request) -> its reply, or the Raw MessagePack of one. Raises a SarpError."""


class Service(Protocol):
    """What a wire needs of a node."""

    @property
    def node(self) -> str:
        """Its name."""

    @property
    def cluster(self) -> str:
        """Id of its cluster; empty while it is not known."""

    @property
    def authenticator(self) -> Authenticator:
        """Who may ask."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What it does, by the operation's name."""

    def ready(self) -> str | None:
        """None: ready; else why not."""

    def metrics(self) -> str:
        """Its metrics, in Prometheus's text format."""

    def page(self) -> str:
        """HTML for people."""


def operation_of(service: Service, name: str) -> tuple[Operation, Handler]:
    """An operation of this service. Raises BadRequestError for one it does not have."""
    operation, handler = OPERATIONS.get(name), service.handlers.get(name)
    if operation is None or handler is None:
        raise BadRequestError(f"operation: {name[:64]!r} is not one of this node", field="operation")
    return operation, handler


def admit(operation: Operation, principal: Principal) -> None:
    """Raise ForbiddenError unless the caller may do it."""
    if operation.scope is not None:
        principal.require(operation.scope)
