"""HTTP to one node: MessagePack over a pool of connections that stay open."""

from __future__ import annotations

import io
import ssl
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from sarp_cluster import limits
from sarp_cluster.client.errors import DeadlineError, UnreachableError, error_of, unsendable
from sarp_cluster.client.transport import Credentials
from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire import messages
from sarp_cluster.wire.codec import JSON, MSGPACK, decode, encode
from sarp_cluster.wire.http_server import TENANT_HEADER
from sarp_cluster.wire.operations import Operation

SENT_AT_ONCE: Final = 2**20
"""Bytes of a body that are given to the connection at once; more of them in pieces."""


class HttpTransport:
    """See sarp_cluster.client.transport.Transport."""

    def __init__(self, address: str, credentials: Credentials, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self._tls = tls
        self._headers = {"Accept": MSGPACK}
        if credentials.token:
            self._headers["Authorization"] = f"Bearer {credentials.token}"
        if credentials.tenant:
            self._headers[TENANT_HEADER] = credentials.tenant
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the pool."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=limits.CLIENT_CONNECTIONS_MAX, ssl=True if self._tls is None else self._tls
                ),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, operation: Operation, message: messages.Request, timeout_s: float) -> Any:  # noqa: ANN401
        """The reply."""
        if self._session is None:
            raise UnreachableError(f"{self.address}: the client is closed", sent=False, change=operation.change)
        try:
            url, body = self._request(operation, message)
        except OverflowError as error:
            raise unsendable(error, change=operation.change) from error
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=limits.CONNECT_TIMEOUT_MS / 1000)
        try:
            async with self._session.request(
                operation.method,
                url,
                data=body if body is None or len(body) < SENT_AT_ONCE else io.BytesIO(body),
                headers={"Content-Type": MSGPACK} if body is not None else None,
                timeout=limit,
                allow_redirects=False,
            ) as response:
                return self._reply(operation, response.status, response.content_type, await response.read())
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachableError(f"{self.address}: cannot connect", sent=False, change=operation.change) from error
        except TimeoutError:
            raise DeadlineError(f"{self.address}: no answer in time", change=operation.change) from None
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(f"{self.address}: {error}", sent=False, change=operation.change) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{self.address}: {str(error) or type(error).__name__}"
            raise UnreachableError(text, sent=True, change=operation.change) from error

    def _request(self, operation: Operation, message: messages.Request) -> tuple[URL, bytes | None]:
        """URL and body: fields are in the path, in the query of a GET, else in the body."""
        path = operation.path
        if operation.method != "GET" and "{" not in path:
            return URL(self.address + path, encoded=True), encode(message)
        fields: dict[str, Any] = msgspec.to_builtins(message)
        for name in [name for name in fields if f"{{{name}}}" in path]:
            path = path.replace(f"{{{name}}}", quote(str(fields.pop(name)), safe=""))
        query = f"?{urlencode(fields)}" if fields else ""
        return URL(self.address + path + query, encoded=True), None

    def _reply(self, operation: Operation, status: int, media: str, body: bytes) -> Any:  # noqa: ANN401
        try:
            if media not in (MSGPACK, JSON):
                raise BadRequestError(f"body: {media}, not {MSGPACK}", field="body")
            if status == HTTPStatus.OK:
                return decode(body, operation.reply, media)
            failed = decode(body, messages.ErrorReply, media)
        except BadRequestError as error:
            text = f"{self.address}: what answers there (status {status}) is no node: {error}"
            raise UnreachableError(text, sent=True, change=operation.change) from error
        raise error_of(failed.error)
