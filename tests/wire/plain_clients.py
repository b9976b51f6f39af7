"""Clients written from docs/protocol.md alone: msgpack and sockets, msgpack and aiohttp, nothing of ours."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from typing import Any, NamedTuple

import aiohttp
import msgpack  # type: ignore[import-untyped]

MSGPACK = "application/msgpack"
JSON = "application/json"
AT_ONCE = 2**20


class PlainStream:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._number = 0

    @classmethod
    async def connect(cls, address: str, hello: dict[str, Any] | None = None) -> PlainStream:
        """Connect and say hello; None: say nothing."""
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        if hello is not None:
            well, body = await client.ask("hello", hello)
            assert well, body
        return client

    def send(self, what: str, body: Any, number: int | None = None) -> int:
        self._number += 1
        number = self._number if number is None else number
        self.send_payload(msgpack.packb([number, what, body]))
        return number

    def send_payload(self, payload: bytes) -> None:
        self.writer.write(len(payload).to_bytes(4, "little") + payload)

    async def receive(self) -> tuple[int, bool, Any]:
        length = int.from_bytes(await self.reader.readexactly(4), "little")
        number, well, body = msgpack.unpackb(await self.reader.readexactly(length), strict_map_key=False)
        return number, well, body

    async def ask(self, what: str, body: Any) -> tuple[bool, Any]:
        number = self.send(what, body)
        answered, well, reply = await self.receive()
        assert answered == number
        return well, reply

    async def closed(self) -> bool:
        """Is it closed by the other side? Waits until it is."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True
        finally:
            self.close()

    def close(self) -> None:
        self.writer.transport.abort()


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        return error


class PlainHttp:
    """A session with one node."""

    def __init__(self, url: str, token: str = "", tls: ssl.SSLContext | bool = True) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=tls))

    async def __aenter__(self) -> PlainHttp:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def ask(
        self, method: str, path: str, body: Any = None, *, media: str = MSGPACK, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a body as MessagePack or JSON."""
        packed = None if body is None else msgpack.packb(body) if media == MSGPACK else json.dumps(body).encode()
        return await self.raw(method, path, packed, {"Content-Type": media, "Accept": media} | (headers or {}))

    async def raw(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        if isinstance(body, bytes) and len(body) > AT_ONCE:
            body = io.BytesIO(body)  # aiohttp sends it in pieces then
        async with self.session.request(method, self._url + path, data=body, headers=headers) as response:
            raw = await response.read()
            if response.content_type == MSGPACK:
                return Answer(response.status, msgpack.unpackb(raw, strict_map_key=False), dict(response.headers))
            if response.content_type == JSON:
                return Answer(response.status, json.loads(raw), dict(response.headers))
            return Answer(response.status, raw.decode(), dict(response.headers))
