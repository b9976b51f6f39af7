"""How the driver reaches the cluster: two routers, each by stream and by HTTP, and what it does when one is gone.

A router that dies breaks the connection: the request goes to the other one. One that does not answer in time is a
failure, whoever else there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import aiohttp

from sarp_cluster.cluster.view import split_address
from sarp_cluster.errors import ConnectionLostError
from sarp_cluster.wire.codec import decode, encode
from sarp_cluster.wire.control import PROTOCOL_VERSION, Hello
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.messages import ErrorReply
from sarp_cluster.wire.operations import OPERATIONS
from sarp_cluster.wire.stream_client import Peer

PAUSE_S: Final = 0.02
CONTENT: Final = {"Content-Type": "application/msgpack"}

R = TypeVar("R")


class Router(Protocol):
    """One router, on one wire."""

    wire: str

    async def ask(self, name: str, message: object, reply: type[R], timeout_s: float) -> R:
        """Its reply. Raises RemoteError, ConnectionLostError, TimeoutError."""


class StreamRouter:
    """By stream. `run` keeps the connection."""

    def __init__(self, address: str) -> None:
        self.wire = f"stream {address}"
        place = split_address(address.removeprefix("sarp://"))
        self._peer = Peer(lambda: place, lambda: Hello(version=PROTOCOL_VERSION))

    async def run(self) -> None:
        await self._peer.run()

    async def ask(self, name: str, message: object, reply: type[R], timeout_s: float) -> R:
        return await self._peer.call(name, message, reply, timeout_s)


class HttpRouter:
    """By HTTP."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.wire = url
        self._session = session

    async def ask(self, name: str, message: object, reply: type[R], timeout_s: float) -> R:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = self.wire + OPERATIONS[name].path
        try:
            async with self._session.post(url, data=encode(message), headers=CONTENT, timeout=timeout) as response:
                body = await response.read()
        except TimeoutError:
            raise
        except aiohttp.ClientError as error:
            raise ConnectionLostError(f"{url}: {error!r}") from error
        if not response.ok:
            raise RemoteError(decode(body, ErrorReply).error)
        return decode(body, reply)


class Routers:
    """All of them, from one that is preferred on."""

    def __init__(self, routers: Sequence[Router], preferred: int) -> None:
        self._routers = list(routers)
        self._at = preferred
        self.wire = ""
        """The one that was asked last."""

    async def ask(self, name: str, message: object, reply: type[R], timeout_s: float, *, again: bool = True) -> R:
        """The reply of the first that is there.

        `again`: the request may be sent to another one when its connection is lost on the way. Raises RemoteError,
        TimeoutError, and ConnectionLostError if it may not.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        tried = 0
        while (left_s := ends - loop.time()) > 0:
            router = self._routers[self._at % len(self._routers)]
            self.wire = router.wire
            try:
                return await router.ask(name, message, reply, left_s)
            except ConnectionLostError:
                self._at += 1
                if not again:
                    raise
                tried += 1
                if tried % len(self._routers) == 0:
                    await asyncio.sleep(PAUSE_S)
        raise TimeoutError("no router answers")


async def call_any(routers: Sequence[Router], name: str, message: object, reply: type[R], timeout_s: float) -> Any:
    """Ask until it is done: for what has to be there before a run begins."""
    every = Routers(routers, 0)
    ends = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await every.ask(name, message, reply, timeout_s)
        except RemoteError:
            if asyncio.get_running_loop().time() > ends:
                raise
            await asyncio.sleep(PAUSE_S)
