"""Whether this coordinator leads, as it counts that itself (design §7).

It asks the membership for a lease again and again, and counts it from when it asked, on its own clock, for a shorter
time than it lasts there. Whoever cannot renew it has stopped leading before another can begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from sarp_cluster import limits
from sarp_cluster.cluster.membership import Membership, Records
from sarp_cluster.errors import MembershipError, NotLeaderError, RecordsRejectedError
from sarp_cluster.wire.node import until

logger: Final = logging.getLogger(__name__)

RENEW_S: Final = limits.LEADER_LEASE_MS / 1000 / 4
LEAD_S: Final = limits.LEADER_LEASE_MS / 1000 * 0.7
"""For how long it leads after it asked, if it hears nothing more. What is left of the lease is more than clocks differ
in that time, and than a call of the membership takes."""


class Leadership:
    """`run` leads whenever no other does."""

    def __init__(
        self, node: str, serve: Callable[[Records], Awaitable[None]], note: Callable[[str, str], None]
    ) -> None:
        self._node = node
        self._serve = serve
        """A term, which begins with these records and ends by being cancelled."""
        self._note = note
        """Tells people: kind and text of an event."""
        self._until = float("-inf")

    @property
    def holds(self) -> bool:
        """Does it lead now? One that was stopped for some time may find that it does no more."""
        return asyncio.get_running_loop().time() < self._until

    async def run(self, membership: Membership) -> None:
        """Lead, again and again."""
        while True:
            while not await self._renewed(membership):
                await asyncio.sleep(RENEW_S)
            ended = asyncio.Event()
            try:
                await until(ended, self._term(membership), self._keep(membership, ended))
            except (MembershipError, NotLeaderError) as error:
                logger.error("this coordinator cannot lead: %s", error)
                await self._resign(membership)
                await asyncio.sleep(RENEW_S)  # another may be able to
            logger.warning("this coordinator leads no more")

    async def _term(self, membership: Membership) -> None:
        try:
            records = await membership.load()
        except RecordsRejectedError as error:
            logger.error("%s", error)
            self._note("records_rejected", f"{error}; all are dropped: the shards know what was in them")
            await membership.discard()
            records = await membership.load()
        await self._serve(records)

    async def _keep(self, membership: Membership, ended: asyncio.Event) -> None:
        """Until another leads, or might."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RENEW_S)
            # Too late, if this process was stopped: then it does not lead unless the answer says so.
            late = loop.time() >= self._until
            end = loop.time() + limits.MEMBERSHIP_TIMEOUT_MS / 1000 if late else self._until
            try:
                async with asyncio.timeout_at(end):
                    renewed = await self._renewed(membership)
            except TimeoutError:
                renewed = None
            if renewed is False or loop.time() >= self._until:
                break
        ended.set()
        await loop.create_future()

    async def _renewed(self, membership: Membership) -> bool | None:
        """Do we lead? None: nobody says."""
        asked_at = asyncio.get_running_loop().time()
        try:
            renewed = await membership.lead(self._node)
        except MembershipError as error:
            logger.warning("whether we lead is not known: %s", error)
            return None
        self._until = asked_at + LEAD_S if renewed else float("-inf")
        return renewed

    async def _resign(self, membership: Membership) -> None:
        self._until = float("-inf")
        try:
            await membership.resign()
        except MembershipError as error:
            logger.warning("%s", error)
