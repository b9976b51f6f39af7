"""A client's way to one node: addresses, and what both wires have in common."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, TooLargeError
from sarp_cluster.wire import messages
from sarp_cluster.wire.control import PROTOCOL_VERSION, Hello
from sarp_cluster.wire.operations import Operation

Timed = TypeVar("Timed", bound=messages.MatchRequest | messages.Change)
Scheme: TypeAlias = Literal["http", "https", "sarp", "sarps"]

SLICE = 0.9
"""Of what is left of a deadline, what the node is told: the rest is for the way back."""


class Address(NamedTuple):
    """Where a node is, and which wire to take."""

    scheme: Scheme
    host: str
    port: int

    @property
    def secure(self) -> bool:
        """Is it spoken to with TLS?"""
        return self.scheme in ("https", "sarps")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class Credentials(NamedTuple):
    """Who asks."""

    token: str = ""
    """The bearer token; empty: none."""
    tenant: str = ""
    """For a credential with several."""
    tls: ssl.SSLContext | None = None
    """Streams are opened with it, those to shards, too."""

    def hello(self) -> Hello:
        """What a stream begins with."""
        return Hello(version=PROTOCOL_VERSION, credential=self.token, tenant=self.tenant)


class Transport(Protocol):
    """A way to one node. `open` it before it is asked, `close` it at the end."""

    @property
    def address(self) -> str:
        """Of the node, for messages."""

    async def open(self) -> None:
        """Begin. Does not wait for the node."""

    async def ask(self, operation: Operation, message: messages.Request, timeout_s: float) -> Any:  # noqa: ANN401
        """The reply, of the operation's type. Raises a CallError."""

    async def close(self) -> None:
        """Let go of its connections."""


def parse_addresses(text: str) -> list[Address]:
    """Addresses separated by commas: http://HOST:PORT, https://HOST:PORT, sarp://HOST:PORT (the stream), sarps://HOST:PORT."""
    found = [_parse(one.strip()) for one in text.split(",") if one.strip()]
    if not found:
        raise BadRequestError("url: no address", field="url")
    if len({one.secure for one in found}) > 1:
        raise BadRequestError("url: some addresses are with TLS and some without", field="url")
    if len(found) > limits.ADDRESSES_MAX:
        raise TooLargeError(f"url: {len(found)} addresses are over the limit of {limits.ADDRESSES_MAX}", field="url")
    return found


def _parse(text: str) -> Address:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    rest = (parts.path.strip("/"), parts.query, parts.fragment, parts.username, parts.password)
    if host is None or port is None or any(rest):
        raise BadRequestError(
            f"url: {text!r} is not http://HOST:PORT, https://HOST:PORT, sarp://HOST:PORT or sarps://HOST:PORT",
            field="url",
        )
    match parts.scheme:
        case "http" | "https" | "sarp" | "sarps" as scheme:
            return Address(scheme, host, port)
        case _:
            raise BadRequestError(
                f"url: {text!r} does not begin with http://, https://, sarp:// or sarps://", field="url"
            )


def open_transports(
    addresses: Sequence[Address], credentials: Credentials, tls: ssl.SSLContext | None
) -> list[Transport]:
    """A transport for each address."""
    # Here, because they import this module.
    from sarp_cluster.client.http_transport import HttpTransport  # noqa: PLC0415
    from sarp_cluster.client.stream_transport import StreamTransport  # noqa: PLC0415

    return [
        StreamTransport(str(one), (one.host, one.port), credentials)
        if one.scheme in ("sarp", "sarps")
        else HttpTransport(str(one), credentials, tls)
        for one in addresses
    ]


def timed(message: messages.Request, left_s: float) -> messages.Request:
    """The message with a deadline that leaves time for the way back, where it has one."""
    deadline_ms = max(1, int(left_s * SLICE * 1000))
    match message:
        case messages.MatchRequest() | messages.Change():
            return _shortened(message, deadline_ms)
        case messages.BatchRequest():
            return messages.BatchRequest(items=[_shortened(item, deadline_ms) for item in message.items])
        case _:
            return message


def _shortened(message: Timed, deadline_ms: int) -> Timed:
    return msgspec.structs.replace(message, deadline_ms=deadline_ms) if message.deadline_ms > deadline_ms else message
