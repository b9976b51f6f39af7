"""The stream to one node: one connection that all calls share, made again when it is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from sarp_cluster.client.errors import DeadlineError, NotNowError, UnreachableError, error_of, unsendable
from sarp_cluster.client.transport import Credentials
from sarp_cluster.errors import BadRequestError, ConnectionLostError, OverloadedError, TooLargeError
from sarp_cluster.wire import messages
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.faults import RemoteError, describe
from sarp_cluster.wire.operations import Operation
from sarp_cluster.wire.stream_client import Peer


class StreamTransport:
    """See sarp_cluster.client.transport.Transport."""

    def __init__(self, address: str, place: tuple[str, int], credentials: Credentials) -> None:
        self.address = address
        self._peer = Peer(lambda: place, credentials.hello, tls=credentials.tls)
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to connect."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._peer.run())

    async def close(self) -> None:
        """Close the connection."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def ask(self, operation: Operation, message: messages.Request, timeout_s: float) -> Any:  # noqa: ANN401
        """The reply."""
        change = operation.change
        if not self._peer.connected:
            timeout_s = await self._connect(operation, timeout_s)
        try:
            raw = await self._peer.ask(operation.name, message, timeout_s)
            return decode(raw, operation.reply)
        except RemoteError as error:
            raise error_of(error.body) from None
        except TimeoutError:
            raise DeadlineError(f"{self.address}: no answer in time", change=change) from None
        except ConnectionLostError as error:
            raise UnreachableError(f"{self.address}: {error}", sent=True, change=change) from error
        except OverloadedError as error:
            raise NotNowError(describe(error, change=change)) from error
        except (TooLargeError, OverflowError) as error:
            raise unsendable(error, change=change) from error
        except BadRequestError as error:
            raise UnreachableError(
                f"{self.address}: its reply makes no sense: {error}", sent=True, change=change
            ) from error

    async def _connect(self, operation: Operation, timeout_s: float) -> float:
        """Wait for the first try at a connection, no longer than the call may take; returns what is left of that.

        Later on, while a lost connection is being made again, calls fail at once: another router can have them.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._peer.tried.wait()
        except TimeoutError:
            text = f"{self.address}: no connection in time"
            raise DeadlineError(text, sent=False, change=operation.change) from None
        if not self._peer.connected:
            refusal = self._peer.refusal
            if refusal is not None:
                raise error_of(refusal.body)
            raise UnreachableError(f"{self.address}: {self._peer.failure}", sent=False, change=operation.change)
        return max(0.001, ends - loop.time())
