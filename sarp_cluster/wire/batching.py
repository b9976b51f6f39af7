"""Runs a batch: what may go together, and what has to wait for what went before (design §8).

Items for one shard run in their order, there is no order across shards. Routers run batches so, and clients that ask
shards themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from sarp_cluster.errors import SarpError
from sarp_cluster.wire import messages
from sarp_cluster.wire.codec import encode
from sarp_cluster.wire.faults import reply_for

Result: TypeAlias = messages.Reply | msgspec.Raw
"""Of an item: its reply, the Raw MessagePack of one, or an ErrorReply."""
Place: TypeAlias = Callable[[messages.BatchItem], tuple[str, messages.BatchItem] | messages.MatchReply | None]
"""Which shard does this item, as what; None: more than one does. A match of nothing is answered at once. Raises a
SarpError for an item that cannot be done."""
Send: TypeAlias = Callable[[str, Sequence[tuple[int, messages.BatchItem]]], Awaitable[Mapping[int, Result]]]
"""Have a shard do its items; the results by number. What was planned by an old map is left out."""
Alone: TypeAlias = Callable[[messages.BatchItem], Awaitable[Result]]
"""Do an item by itself. Raises a SarpError."""

OVERTAKEN: Final = messages.ErrorBody(
    code="wrong_shard",
    message="the slot map changed, and a later change of this worker was applied meanwhile; send again from this one "
    "on, with new numbers",
    retry_after_ms=1,
    outcome="not_applied",
)
ERROR_BEGINS: Final = encode({"error": 0})[:7]
"""How a result begins that is an ErrorReply: a map of one, whose key is "error"."""


async def run_batch(items: Sequence[messages.BatchItem], place: Place, send: Send, alone: Alone) -> list[Result]:
    """The results of the items, in their order."""
    results: dict[int, Result] = {}
    turn = Turn()
    for number, item in enumerate(items):
        change = not isinstance(item, messages.MatchRequest)
        try:
            placed = place(item)
        except SarpError as error:
            results[number] = reply_for(error, change=change)
            continue
        if isinstance(placed, messages.MatchReply):
            results[number] = placed
            continue
        if not turn.takes(change=change, cut=placed is None):
            await _take(turn, items, results, send, alone)
            turn = Turn()
        turn.add(number, placed, change=change)
    await _take(turn, items, results, send, alone)
    return [results[number] for number in range(len(items))]


async def _take(
    turn: Turn, items: Sequence[messages.BatchItem], results: dict[int, Result], send: Send, alone: Alone
) -> None:
    async def by_itself(number: int) -> None:
        item = items[number]
        try:
            results[number] = await alone(item)
        except SarpError as error:
            results[number] = reply_for(error, change=not isinstance(item, messages.MatchRequest))

    async def together(shard: str, batch: Sequence[tuple[int, messages.BatchItem]]) -> None:
        results.update(await send(shard, batch))

    await asyncio.gather(
        *(together(shard, batch) for shard, batch in turn.together.items()), *(by_itself(one) for one in turn.cut)
    )
    for number in turn.numbers:
        if number in results:
            continue
        # It was planned by an old map.
        if _overtaken(items, number, results):
            results[number] = messages.ErrorReply(error=OVERTAKEN)
        else:
            await by_itself(number)


class Turn:
    """Items of a batch that may be asked for at the same time: those of a shard are sent to it in one batch.

    A change that is cut goes to several shards, so it has a turn of its own: sent beside the others, an earlier item
    could come after it, or a later one before it, whose higher seq would have it taken for a repetition. Matches that
    are cut go beside other matches, not beside changes.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Of its items, in their order."""
        self.together: dict[str, list[tuple[int, messages.BatchItem]]] = {}
        """What each shard is asked: number and message."""
        self.cut: list[int] = []
        """Those that go to several shards."""
        self._changes = False
        self._full = False

    def takes(self, *, change: bool, cut: bool) -> bool:
        """May this item have its turn with those that are here?"""
        if not self.numbers:
            return True
        if self._full or (change and cut):
            return False
        return not self._changes if cut else not (change and self.cut)

    def add(self, number: int, placed: tuple[str, messages.BatchItem] | None, *, change: bool) -> None:
        """Add an item: where it goes and as what, or None when it is cut."""
        self.numbers.append(number)
        self._changes = self._changes or change
        if placed is None:
            self.cut.append(number)
            self._full = change
        else:
            shard, message = placed
            self.together.setdefault(shard, []).append((number, message))


def _overtaken(items: Sequence[messages.BatchItem], number: int, results: Mapping[int, Result]) -> bool:
    """Was a later change of the same worker applied already? Then this one's seq is over."""
    item = items[number]
    if not isinstance(item, messages.Change) or item.seq is None:
        return False
    return any(
        isinstance(other, messages.Change)
        and other.seq is not None
        and (other.worker, other.dp_rank) == (item.worker, item.dp_rank)
        and not is_error(results.get(later))
        for later, other in enumerate(items[number + 1 :], number + 1)
    )


def is_error(result: Result | None) -> bool:
    """Is this not the reply to an item that was done?"""
    if isinstance(result, msgspec.Raw):
        return bytes(result).startswith(ERROR_BEGINS)
    return result is None or isinstance(result, messages.ErrorReply)
