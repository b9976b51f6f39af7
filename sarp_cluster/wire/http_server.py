"""The HTTP wire: aiohttp's low-level server, MessagePack or JSON by content type, and bounds that it lacks (design §8).

What aiohttp leaves open is closed here: a connection that does not send a whole request in time, idles, or is one too
many is dropped; a body is refused by its declared length before it is read, and never unpacked.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, RequestError, SarpError, TooLargeError
from sarp_cluster.wire.auth import bearer
from sarp_cluster.wire.codec import JSON, MSGPACK, convert, decode, encode
from sarp_cluster.wire.faults import describe, status_of
from sarp_cluster.wire.messages import BatchReply, ErrorReply, Reply
from sarp_cluster.wire.operations import OPERATIONS, Operation
from sarp_cluster.wire.service import Handler, Service, admit

logger: Final = logging.getLogger(__name__)

SWEEP_S: Final = 1.0
"""How often connections are looked at whose time may be over."""
TENANT_HEADER: Final = "Sarp-Tenant"
_MEDIA: Final = {
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
    "application/json": JSON,
}


class _Refusal(RequestError):
    """A request that HTTP itself refuses."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.code = code


class HttpServer:
    """Serves a service by HTTP. Make one with `start`, and `close` it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._routes: dict[tuple[str, str], tuple[Operation, Handler]] = {}
        self._patterns: list[tuple[str, str, str, str, tuple[Operation, Handler]]] = []
        for name, handler in service.handlers.items():
            operation = OPERATIONS[name]
            if "{" in operation.path:
                before, _, rest = operation.path.partition("{")
                field, _, after = rest.partition("}")
                self._patterns.append((operation.method, before, field, after, (operation, handler)))
            elif operation.path:
                self._routes[operation.method, operation.path] = operation, handler
        self._paths = {path for _, path in self._routes}
        self._plain: dict[str, Callable[[], web.Response]] = {
            "/healthz": lambda: web.Response(text="ok\n"),
            "/readyz": self._ready,
            "/metrics": lambda: web.Response(text=service.metrics(), content_type="text/plain"),
            "/": lambda: web.Response(text=service.page(), content_type="text/html"),
        }
        self._watched: dict[RequestHandler, tuple[float, float]] = {}
        """Connections on which a request is awaited: since when, and how long."""
        self._manager: _Manager | None = None
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, service: Service, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> HttpServer:
        """Listen. Port 0 takes a free one; `address` says which."""
        server = cls(service)
        loop = asyncio.get_running_loop()
        server._manager = _Manager(server)
        server._server = await loop.create_server(
            server._manager,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else limits.HEADER_TIMEOUT_MS / 1000,
            backlog=1024,
        )
        server._sweep()
        return server

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        if self._server is None:
            raise BadRequestError("the HTTP server was not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self, finish_s: float = 0.0) -> None:
        """Take no more connections; give requests in flight so long; drop what is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        if self._manager is not None:
            self._manager.pre_shutdown()
            await self._manager.shutdown(finish_s)
        if self._server is not None:
            await self._server.wait_closed()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        protocol = request.protocol
        self._watched.pop(protocol, None)
        try:
            return await self._handle(request)
        finally:
            # From now on it is idle; what comes next has to come in time.
            if protocol.transport is not None:
                self._watch(protocol, limits.IDLE_TIMEOUT_MS)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        operation, media = None, _media_of_errors(request)
        try:
            path = request.rel_url.raw_path  # decoded once, behind the question which path it is
            plain = self._plain.get(path)
            if plain is not None and request.method == "GET":
                return plain()
            # Whoever is not known learns nothing, not even which paths there are.
            principal = self._service.authenticator.authenticate(
                bearer(request.headers.get("Authorization", "")), request.headers.get(TENANT_HEADER, "")
            )
            operation, handler, fields = self._route(request.method, path)
            admit(operation, principal)
            media = _media(request)
            body = await self._body(request, operation)
            if operation.method == "GET":
                fields |= request.query
            if body and (fields or operation.method == "GET"):
                raise BadRequestError("body: this path takes none", field="body")
            message = decode(body, operation.request, media) if body else convert(fields, operation.request)
            reply = await handler(principal, message)
            if media != MSGPACK:
                reply = _readable(reply, operation)
            return web.Response(body=encode(reply, media), headers={"Content-Type": media})
        except SarpError as error:
            return self._error(request, error, operation, media)
        except web.HTTPRequestEntityTooLarge:
            return self._error(request, TooLargeError("body: over the limit", field="body"), operation, media)
        except ConnectionError:
            raise
        except Exception as error:  # the border: nobody but our log learns more
            logger.exception("an operation failed")
            return self._error(request, error, operation, media)

    def _route(self, method: str, path: str) -> tuple[Operation, Handler, dict[str, str]]:
        found = self._routes.get((method, path))
        if found is not None:
            return *found, {}
        known = path in self._paths
        for wanted, before, field, after, route in self._patterns:
            if path.startswith(before) and path.endswith(after) and len(path) > len(before) + len(after):
                value = path[len(before) : len(path) - len(after)]
                if "/" not in value:
                    if method == wanted:
                        return *route, {field: unquote(value)}
                    known = True
        if known:
            raise _Refusal("method_not_allowed", f"method: {method} is not one of this path", "method")
        raise _Refusal("not_found", f"path: {path[:200]!r} is not one of this node", "path")

    async def _body(self, request: web.BaseRequest, operation: Operation) -> bytes:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise _Refusal("unsupported_media", "Content-Encoding: bodies are not unpacked here", "Content-Encoding")
        declared = request.content_length
        if declared is not None and declared > operation.body_bytes_max:
            raise TooLargeError(
                f"body: {declared} bytes are over the limit of {operation.body_bytes_max}", field="body"
            )
        if not request.can_read_body:
            return b""
        if request.content.is_eof():  # all of it came with its head
            body = request.content.read_nowait()
        else:
            try:
                async with asyncio.timeout(limits.BODY_TIMEOUT_MS / 1000):
                    body = await request.read()
            except TimeoutError:
                text = f"body: did not come within {limits.BODY_TIMEOUT_MS} ms"
                raise _Refusal("bad_request", text, "body") from None
        highest = min(operation.body_bytes_max, limits.BATCH_BYTES_MAX)
        if len(body) > highest:
            raise TooLargeError(f"body: over the limit of {highest} bytes", field="body")
        return body

    def _error(
        self, request: web.BaseRequest, error: Exception, operation: Operation | None, media: str
    ) -> web.Response:
        body = describe(error, change=operation is not None and operation.change)
        status = status_of(body)
        response = web.Response(status=status, body=encode(ErrorReply(error=body), media), content_type=media)
        if body.retry_after_ms is not None:
            response.headers["Retry-After"] = str(-(-body.retry_after_ms // 1000))
        if status == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        if not request.content.is_eof():
            response.force_close()  # what is left of the body is not read
        return response

    def _ready(self) -> web.Response:
        why_not = self._service.ready()
        if why_not is None:
            return web.Response(text="ready\n")
        return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text=f"{why_not}\n")

    # --- connections --------------------------------------------------------------------------------------------------

    def opened(self, protocol: RequestHandler) -> None:
        """A connection was made."""
        self._watch(protocol, limits.HEADER_TIMEOUT_MS)

    def closed(self, protocol: RequestHandler) -> None:
        """A connection is gone."""
        self._watched.pop(protocol, None)

    def _watch(self, protocol: RequestHandler, limit_ms: int) -> None:
        self._watched[protocol] = asyncio.get_running_loop().time(), limit_ms / 1000

    def _sweep(self) -> None:
        """Drop connections on which no whole request head has come for too long.

        One that is idle between two requests, and one that is slow with its next, look alike: both have
        limits.IDLE_TIMEOUT_MS, a new one limits.HEADER_TIMEOUT_MS.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        for protocol, (since, limit_s) in list(self._watched.items()):
            if now - since > limit_s:
                del self._watched[protocol]
                protocol.force_close()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)


def _readable(reply: Reply | msgspec.Raw, operation: Operation) -> Reply:
    """A reply with nothing left in it that is MessagePack already."""
    message = decode(reply, operation.reply) if isinstance(reply, msgspec.Raw) else reply
    if isinstance(message, BatchReply):
        results = [msgspec.Raw(encode(msgspec.msgpack.decode(one), JSON)) for one in message.results]
        return BatchReply(results=results)
    return message


def _media(request: web.BaseRequest) -> str:
    """What the body is, and the reply will be."""
    kind = request.headers.get("Content-Type", "")
    if not kind or not request.can_read_body:
        accepted = request.headers.get("Accept", "")
        return MSGPACK if "msgpack" in accepted or request.can_read_body else JSON
    media = _MEDIA.get(kind.partition(";")[0].strip().lower())
    if media is None:
        raise _Refusal("unsupported_media", "Content-Type: neither application/msgpack nor application/json")
    return media


def _media_of_errors(request: web.BaseRequest) -> str:
    """What a caller understands of whom nothing else is known yet."""
    known = request.headers.get("Content-Type", "") + request.headers.get("Accept", "")
    return MSGPACK if "msgpack" in known else JSON


class _Request(web.BaseRequest):
    """A request whose body may have as many bytes as the longest of any operation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # aiohttp's own
        super().__init__(*args, **kwargs, client_max_size=limits.BATCH_BYTES_MAX)


class _Manager(web.Server):
    """Makes connections, as many as there may be, and tells when they come and go."""

    def __init__(self, server: HttpServer) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server.handle,
            request_factory=lambda message, payload, protocol, writer, task: _Request(
                message, payload, protocol, writer, task, loop
            ),
            keepalive_timeout=limits.IDLE_TIMEOUT_MS / 1000,
            access_log=None,
            max_line_size=limits.HEADER_BYTES_MAX,
            max_field_size=limits.HEADER_BYTES_MAX,
            auto_decompress=False,
            lingering_time=0,
        )
        self._owner = server

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """A connection was made; one too many is closed at once."""
        super().connection_made(handler, transport)
        if len(self._connections) > limits.CONNECTIONS_MAX:
            # Once the handler has begun: aiohttp does not expect to lose it before.
            asyncio.get_running_loop().call_soon(transport.abort)
        else:
            self._owner.opened(handler)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """A connection is gone."""
        self._owner.closed(handler)
        super().connection_lost(handler, exc)
