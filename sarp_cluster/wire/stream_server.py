"""The stream's server side: one protocol a connection, no task for what need not wait (design §3).

The answers of one turn of the loop go out together. A connection is read no further while too many of its requests are
in flight or it does not take its answers, and is dropped when it is slow to say hello, silent for long, sends what
cannot be read, or leaves too many answers lying.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, cast

import msgspec

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, SarpError
from sarp_cluster.wire import frames
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.control import PROTOCOL_VERSION, Hello, Welcome
from sarp_cluster.wire.eager import Begun
from sarp_cluster.wire.faults import reply_for
from sarp_cluster.wire.messages import Done
from sarp_cluster.wire.operations import Operation
from sarp_cluster.wire.service import Service, admit, operation_of

logger: Final = logging.getLogger(__name__)

FRAMES_A_TURN: Final = 64
"""Frames of one connection that are begun before others have their turn: about a millisecond of matches."""
LOOK_S: Final = 5.0
"""How often, at least, a connection is looked at whose time may be over."""
FEATURES: Final[tuple[str, ...]] = ()
"""What this program speaks beyond its protocol's version."""


class StreamServer:
    """Serves a service by stream. Make one with `start`, and `close` it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.connections: set[StreamConnection] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, service: Service, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> StreamServer:
        """Listen. Port 0 takes a free one; `address` says which."""
        server = cls(service)
        loop = asyncio.get_running_loop()
        server._server = await loop.create_server(
            lambda: StreamConnection(server),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else limits.HEADER_TIMEOUT_MS / 1000,
            backlog=1024,
        )
        return server

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        if self._server is None:
            raise BadRequestError("the stream server was not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self, finish_s: float = 0.0) -> None:
        """Take no more connections; give requests in flight so long; drop what is left."""
        if self._server is not None:
            self._server.close()
        tasks = [task for connection in self.connections for task in connection.tasks]
        if tasks and finish_s > 0:
            await asyncio.wait(tasks, timeout=finish_s)
        for connection in list(self.connections):
            connection.drop()
        if self._server is not None:
            await self._server.wait_closed()


class StreamConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server
        self._service = server.service
        self._loop = asyncio.get_running_loop()
        self._reader = frames.request_reader()
        self._waiting: deque[frames.Request] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._principal: Principal | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opened_at = self._heard_at = self._loop.time()
        self._frame_at: float | None = None
        """When a frame began that is not complete yet."""
        self._turn_due = False
        self._flush_due = False
        self._paused = False
        self._stuck = False
        self._failed = False
        self.tasks: set[asyncio.Task[None]] = set()

    # --- the transport's calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's says so, but is not derived from it
        if len(self._server.connections) >= limits.CONNECTIONS_MAX:
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._transport.set_write_buffer_limits(high=limits.SEND_BUFFER_BYTES_MAX // 16)
        self._timer = self._loop.call_later(limits.HEADER_TIMEOUT_MS / 1000, self._look_at_time)

    def connection_lost(self, _: Exception | None) -> None:
        """It is gone: what it asked for and has not begun to change anything ends."""
        self._server.connections.discard(self)
        self._transport = None
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        # Changes go on: whether they were answered or not, they are whole.

    def data_received(self, data: bytes) -> None:
        """Some bytes have arrived."""
        self._heard_at = self._loop.time()
        self._reader.feed(data)
        before = len(self._waiting)
        try:
            self._waiting.extend(self._reader.frames())
        except SarpError as error:
            self._give_up(error)
            return
        if not self._reader.partial:
            self._frame_at = None
        elif self._frame_at is None or len(self._waiting) > before:
            self._frame_at = self._heard_at
        if not self._turn_due:
            self._turn()

    def pause_writing(self) -> None:
        """The peer does not take its answers."""
        self._stuck = True
        self._look_at_flow()

    def resume_writing(self) -> None:
        """It does again."""
        self._stuck = False
        self._look_at_flow()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Begin what is waiting, but leave the others their turn."""
        self._turn_due = False
        begun = 0
        while self._waiting and not self._failed and len(self.tasks) < limits.REQUESTS_A_CONNECTION_MAX:
            if begun >= FRAMES_A_TURN:
                self._turn_due = True
                self._loop.call_soon(self._turn)
                break
            begun += 1
            self._begin(*self._waiting.popleft())
        self._look_at_flow()
        self._flush()

    def _begin(self, number: int, name: str, raw: msgspec.Raw) -> None:
        if self._principal is None:
            self._say_hello(number, name, raw)
            return
        if name == "ping":
            self._answer(number, True, Done())
            return
        change = False
        try:
            operation, handler = operation_of(self._service, name)
            change = operation.change
            admit(operation, self._principal)
            running = handler(self._principal, decode(raw, operation.request))
        except Exception as error:  # the border: every error becomes a reply
            self._refuse(number, error, change)
            return
        assert isinstance(running, Coroutine)  # noqa: S101  # handlers are async functions
        try:
            begun = Begun(running)
        except Exception as error:
            self._refuse(number, error, change)
            return
        if begun.done:
            self._answer(number, True, begun.result)
            return
        task = self._loop.create_task(self._finish(number, operation, begun))
        self.tasks.add(task)

    async def _finish(self, number: int, operation: Operation, begun: Begun[Any]) -> None:
        try:
            self._answer(number, True, await begun.rest())
        except Exception as error:
            self._refuse(number, error, operation.change)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self.tasks.discard(task)
            self._flush_soon()
            if self._waiting and not self._turn_due:
                self._turn_due = True
                self._loop.call_soon(self._turn)

    def _say_hello(self, number: int, name: str, raw: msgspec.Raw) -> None:
        try:
            if name != "hello":
                raise BadRequestError("hello: the first frame of a connection has to be one", field="operation")
            hello = decode(raw, Hello)
            if hello.version < 1:
                raise BadRequestError(f"version: {hello.version} is not a version of the protocol", field="version")
            ours = self._service.cluster
            if hello.cluster and ours and hello.cluster != ours:
                raise BadRequestError("cluster: this node belongs to another one", field="cluster")
            self._principal = self._service.authenticator.authenticate(hello.credential, hello.tenant)
        except SarpError as error:
            self._give_up(error, number)
            return
        welcome = Welcome(
            version=min(hello.version, PROTOCOL_VERSION), features=FEATURES, cluster=ours, node=self._service.node
        )
        self._answer(number, True, welcome)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, number: int, well: bool, body: object) -> None:
        try:
            self._out.append(frames.pack(number, well, body))
        except SarpError as error:
            self._out.append(frames.pack(number, False, reply_for(error)))

    def _refuse(self, number: int, error: Exception, change: bool) -> None:
        if not isinstance(error, SarpError):
            logger.error("an operation failed", exc_info=error)
        self._answer(number, False, reply_for(error, change=change))

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        out, self._out = self._out, []
        if not out or self._transport is None:
            return
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._transport.get_write_buffer_size() > limits.SEND_BUFFER_BYTES_MAX:
            self.drop()

    # --- the connection -----------------------------------------------------------------------------------------------

    def _look_at_flow(self) -> None:
        """Read on, or not."""
        if self._transport is None or self._failed:
            return
        busy = self._stuck or len(self.tasks) >= limits.REQUESTS_A_CONNECTION_MAX or bool(self._waiting)
        if busy and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        elif self._paused and not busy:
            self._paused = False
            if self._frame_at is not None:
                self._frame_at = self._loop.time()  # it was we who did not read
            self._transport.resume_reading()

    def _look_at_time(self) -> None:
        """Drop who does not say hello, does not end a frame, or says nothing for long. Single bytes do not help."""
        since, limit_ms = self._heard_at, limits.STREAM_IDLE_TIMEOUT_MS
        if self._principal is None:
            since, limit_ms = self._opened_at, limits.HEADER_TIMEOUT_MS
        elif self._frame_at is not None and not self._paused:
            since, limit_ms = self._frame_at, limits.BODY_TIMEOUT_MS
        left_s = since + limit_ms / 1000 - self._loop.time()
        if left_s <= 0 and not self.tasks:
            self.drop()
            return
        self._timer = self._loop.call_later(min(max(left_s, 0.05), LOOK_S), self._look_at_time)

    def _give_up(self, error: SarpError, number: int = 0) -> None:
        """Say why, and close: what follows cannot be read, or must not be."""
        self._failed = True
        self._waiting.clear()
        self._out.append(frames.pack(number, False, reply_for(error)))
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        """Close at once, whatever is in flight."""
        if self._transport is not None:
            self._transport.abort()
