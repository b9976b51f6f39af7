"""The router's lines to the shards: one stream to each, deadlines, and what a missing answer means (design §7)."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Final

import msgspec

from sarp_cluster import limits
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.errors import ConnectionLostError, OverloadedError, SarpError
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.planning import match_reason
from sarp_cluster.wire.stream_client import Peer

logger: Final = logging.getLogger(__name__)

SLOW_AFTER: Final = 3
"""Requests in a row that a shard did not answer in time, after which it is taken for slow."""
TRIAL_S: Final = 0.1
"""A slow shard is tried again so often, with one request: the others do not wait for it."""


class ShardLink:
    """One shard."""

    def __init__(self, shard: str, view: ClusterView, hello: control.Hello, tls: ssl.SSLContext | None = None) -> None:
        self.shard = shard
        self._view = view
        self.peer = Peer(self._address, lambda: hello, tls=tls, reconnect_ms_max=limits.SHARD_RECONNECT_MS_MAX)
        self.sent = 0
        self.unanswered = 0
        """Requests that were not answered in time, or whose connection was lost."""
        self._late = 0
        self._trial_at = 0.0

    def _address(self) -> tuple[str, int] | None:
        address = self._view.addresses.get(self.shard)
        return None if address is None else address.stream_address

    @property
    def slow(self) -> bool:
        """Has it not answered in time for some requests in a row?"""
        return self._late >= SLOW_AFTER

    def may_try(self, now: float) -> bool:
        """May a request be sent to it? One at a time, if it is slow."""
        if not self.slow:
            return True
        if now < self._trial_at:
            return False
        self._trial_at = now + TRIAL_S
        return True

    async def ask(self, name: str, message: object, timeout_s: float) -> msgspec.Raw:
        """Ask it. Raises TimeoutError, ConnectionLostError, RemoteError, OverloadedError."""
        self.sent += 1
        try:
            raw = await self.peer.ask(name, message, timeout_s)
        except TimeoutError:
            self.unanswered += 1
            self._late += 1
            raise
        except ConnectionLostError:
            self.unanswered += 1
            self._late = 0
            raise
        except RemoteError:
            self._late = 0
            raise
        self._late = 0
        return raw


class Links:
    """All shards. `run` keeps the lines."""

    def __init__(self, view: ClusterView, hello: control.Hello, tls: ssl.SSLContext | None = None) -> None:
        self._view = view
        self._hello = hello
        self._tls = tls
        self._links: dict[str, ShardLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.degraded: dict[messages.Reason, int] = {}
        """How often a stretch's answer did not come, by reason."""

    def all(self) -> list[ShardLink]:
        """The lines there are."""
        return list(self._links.values())

    def link(self, shard: str) -> ShardLink:
        """The line to a shard; made if it is new."""
        found = self._links.get(shard)
        if found is None:
            found = self._links[shard] = ShardLink(shard, self._view, self._hello, self._tls)
            self._tasks[shard] = asyncio.get_running_loop().create_task(found.peer.run())
        return found

    def changed(self) -> None:
        """The map or the addresses have changed."""
        if self._view.slot_map is not None:
            for shard in self._view.slot_map.shards:
                link = self.link(shard)
                if not link.peer.connected:
                    link.peer.reconnect()

    async def close(self) -> None:
        """Let go of all."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def count(self, reason: messages.Reason) -> messages.Reason:
        """Count it."""
        self.degraded[reason] = self.degraded.get(reason, 0) + 1
        return reason

    async def match(
        self, shard: str, request: messages.MatchRequest, timeout_s: float
    ) -> msgspec.Raw | messages.Reason:
        """A shard's answer to a match, unread, or why there is none.

        Raises RemoteError for what is the caller's fault, and for wrong_shard, after which the caller plans anew.
        """
        link = self.link(shard)
        reason: messages.Reason = "shard_slow"
        if timeout_s <= 0:
            return self.count("deadline")
        if not link.may_try(asyncio.get_running_loop().time()):
            return self.count(reason)
        try:
            return await link.ask("match", request, timeout_s)
        except TimeoutError:
            pass
        except OverloadedError:
            reason = "overload"
        except RemoteError as error:
            if error.code == "wrong_shard":
                raise
            reason = match_reason(error.body)
        except ConnectionLostError:
            address = self._view.addresses.get(shard)
            reason = "recovering" if address is not None and address.state == "recovering" else "shard_down"
        return self.count(reason)

    async def change(
        self, shard: str, name: str, request: messages.Request, timeout_s: float
    ) -> msgspec.Raw | messages.ErrorBody:
        """A shard's reply to a change, unread, or the error, which says what is known of the outcome."""
        link = self.link(shard)
        if not link.peer.connected:
            return down(shard, "not_applied")
        try:
            return await link.ask(name, request, timeout_s)
        except TimeoutError:
            return messages.ErrorBody(
                code="timeout",
                message=f"shard {shard} did not answer in time",
                retry_after_ms=limits.RECONNECT_MS_MAX,
                outcome="unknown",
            )
        except RemoteError as error:
            return error.body
        except OverloadedError as error:
            return messages.ErrorBody(
                code="overloaded", message=str(error), retry_after_ms=limits.RECONNECT_MS_MAX, outcome="not_applied"
            )
        except ConnectionLostError:
            return down(shard, "unknown")

    async def tell_all(self, name: str, message: object, timeout_s: float) -> None:
        """Tell every shard that is there."""

        async def tell(link: ShardLink) -> None:
            try:
                await link.peer.ask(name, message, timeout_s)
            except (SarpError, TimeoutError) as error:
                logger.debug("%s was not told: %s", link.shard, error)

        await asyncio.gather(*(tell(link) for link in self.all() if link.peer.connected))


def down(shard: str, outcome: messages.Outcome) -> messages.ErrorBody:
    """What is told of a change whose shard is not there."""
    return messages.ErrorBody(
        code="shard_down",
        message=f"shard {shard} is not there; its supervisor or an operator brings it back",
        retry_after_ms=limits.RECONNECT_MS_MAX,
        outcome=outcome,
    )
