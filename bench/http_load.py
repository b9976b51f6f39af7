"""An HTTP connection that costs its own process as little as can be: one request at a time, kept alive."""

from __future__ import annotations

import asyncio
from typing import cast


class HttpConnection(asyncio.Protocol):
    """One connection. Make one with `open`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> HttpConnection:
        """Connect."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        """Some of an answer."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._waiting is None:
            return
        head = bytes(self._buffer[:end])
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        waiting, self._waiting = self._waiting, None
        if head[9:12] == b"200":
            waiting.set_result(body)
        else:
            waiting.set_exception(RuntimeError(f"{head[:40]!r} {body[:200]!r}"))

    async def post(self, path: str, body: bytes, media: str) -> bytes:
        """Ask; the answer's body."""
        if self._transport is None:
            raise ConnectionError("not connected")
        self._waiting = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        return await self._waiting

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()
