"""The stream's client side: one connection that many requests share, and one that is made again when it is lost.

The requests of one turn of the loop go out together. An answer that comes after its request was given up is dropped.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, TypeVar, cast

import msgspec

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, ConnectionLostError, OverloadedError, SarpError
from sarp_cluster.wire import frames
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.control import Hello, Welcome
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.messages import Empty, ErrorReply

PING_S: Final = limits.STREAM_IDLE_TIMEOUT_MS / 1000 / 3

T = TypeVar("T")


class StreamClient(asyncio.Protocol):
    """One connection. Make one with `connect`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = frames.response_reader()
        self._pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._out: list[bytes] = []
        self._next = 0
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection is."""
        self.welcome: Welcome | None = None

    @classmethod
    async def connect(
        cls, host: str, port: int, hello: Hello, *, tls: ssl.SSLContext | None = None, timeout_s: float | None = None
    ) -> StreamClient:
        """Connect and say hello. Raises ConnectionLostError, or RemoteError when it is refused."""
        limit = limits.CONNECT_TIMEOUT_MS / 1000 if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        client = None
        try:
            async with asyncio.timeout(limit):
                _, client = await loop.create_connection(cls, host, port, ssl=tls)
                client.welcome = decode(await client.request("hello", hello), Welcome)
        except (OSError, TimeoutError) as error:
            if client is not None:
                client.close()
            raise ConnectionLostError(f"{host}:{port}: cannot connect: {str(error) or 'no answer in time'}") from error
        except BaseException:
            if client is not None:
                client.close()
            raise
        return client

    @property
    def open(self) -> bool:
        """Can requests be sent?"""
        return self._transport is not None

    @property
    def in_flight(self) -> int:
        """Requests that have no answer yet."""
        return len(self._pending)

    def send(self, name: str, message: object) -> asyncio.Future[msgspec.Raw]:
        """Send a request; the future is its reply's body, or a RemoteError or ConnectionLostError.

        Who no longer waits for it cancels it.
        """
        if self._transport is None:
            raise ConnectionLostError("the connection is closed")
        if len(self._pending) >= limits.REQUESTS_A_CONNECTION_MAX * 4:
            raise OverloadedError(f"{len(self._pending)} requests wait for this node already")
        number = self._next
        self._next = (number + 1) & frames.ID_MAX
        packed = frames.pack(number, name, message)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(packed)
        future = self._pending[number] = self._loop.create_future()
        return future

    async def request(self, name: str, message: object) -> msgspec.Raw:
        """Send a request and wait for its reply's body."""
        return await self.send(name, message)

    def close(self) -> None:
        """Close; what is in flight fails."""
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's says so, but is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone, and with it every answer that had not come."""
        self._transport = None
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(ConnectionLostError(f"the connection was lost: {error or 'closed by the peer'}"))
                future.exception()  # who waits gets it; nobody may wait any more
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Some bytes have arrived."""
        self._reader.feed(data)
        try:
            for number, well, body in self._reader.frames():
                self._take(number, well, body)
        except SarpError:
            self.close()  # never used again: what follows cannot be told from the rest

    def _take(self, number: int, well: bool, body: msgspec.Raw) -> None:
        future = self._pending.pop(number, None)
        if future is None or future.done():
            return
        if well:
            future.set_result(body)
            return
        try:
            future.set_exception(RemoteError(decode(body, ErrorReply).error))
        except BadRequestError as error:
            future.set_exception(ConnectionLostError(f"an error that cannot be read: {error}"))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is None or not out:
            return
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._transport.get_write_buffer_size() > limits.SEND_BUFFER_BYTES_MAX:
            self.close()  # it does not read


class Peer:
    """A node that we talk to for as long as we live: the connection is made again whenever it is lost.

    `run` keeps the connection and has to be running. Requests fail at once while there is none.
    """

    def __init__(
        self,
        address: Callable[[], tuple[str, int] | None],
        hello: Callable[[], Hello],
        *,
        tls: ssl.SSLContext | None = None,
        reconnect_ms_max: int = limits.RECONNECT_MS_MAX,
    ) -> None:
        self._address = address
        self._hello = hello
        self._tls = tls
        self._pause_s_max = reconnect_ms_max / 1000
        self.client: StreamClient | None = None
        self.failure = "not connected yet"
        """Why there is no connection."""
        self.refusal: RemoteError | None = None
        """What the node answered, if it refused the last try at one."""
        self.tried = asyncio.Event()
        """Set once a first try at a connection has ended, well or not."""
        self._connected = asyncio.Event()
        self._nudge = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Is there a connection?"""
        return self.client is not None and self.client.open

    async def wait_connected(self) -> None:
        """Until there is one."""
        await self._connected.wait()

    def reconnect(self) -> None:
        """The address may have changed, or the node may be back: try now."""
        self._nudge.set()

    async def run(self) -> None:
        """Keep the connection, for ever."""
        pause_s = 0.01
        try:
            while True:
                self._nudge.clear()
                address = self._address()
                if address is None:
                    self.failure, self.refusal = "no address is known", None
                else:
                    try:
                        self.client = await StreamClient.connect(*address, self._hello(), tls=self._tls)
                    except SarpError as error:
                        self.failure = str(error)
                        self.refusal = error if isinstance(error, RemoteError) else None
                    else:
                        self.refusal = None
                        self._connected.set()
                        self.tried.set()
                        pause_s = 0.01
                        await self._keep(self.client)
                        self._connected.clear()
                        self.failure = "the connection was lost"
                        continue
                self.tried.set()
                try:
                    async with asyncio.timeout(pause_s):
                        await self._nudge.wait()
                except TimeoutError:
                    pause_s = min(pause_s * 2, self._pause_s_max)
        finally:
            if self.client is not None:
                self.client.close()

    async def _keep(self, client: StreamClient) -> None:
        """Until it is lost: say something now and then, so that it is not taken for dead."""
        while not client.lost.done():
            await asyncio.wait([client.lost], timeout=PING_S)
            if client.open and not client.in_flight:
                client.send("ping", Empty()).cancel()

    def send(self, name: str, message: object) -> asyncio.Future[msgspec.Raw]:
        """As StreamClient.send; ConnectionLostError when there is no connection."""
        if self.client is None or not self.client.open:
            raise ConnectionLostError(self.failure)
        return self.client.send(name, message)

    async def ask(self, name: str, message: object, timeout_s: float) -> msgspec.Raw:
        """Ask, and wait so long for the reply's body. Raises TimeoutError, ConnectionLostError, RemoteError.

        Needs no task, as `asyncio.timeout` does.
        """
        future = self.send(name, message)
        timer = asyncio.get_running_loop().call_later(timeout_s, _expire, future)
        try:
            return await future
        finally:
            timer.cancel()

    async def call(self, name: str, message: object, reply: type[T], timeout_s: float) -> T:
        """As `ask`; the reply, read."""
        return decode(await self.ask(name, message, timeout_s), reply)


def _expire(future: asyncio.Future[msgspec.Raw]) -> None:
    if not future.done():
        future.set_exception(TimeoutError("no answer in time"))
