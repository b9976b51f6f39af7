"""Matches that are asked for in the same turn of the loop, as one batch: by HTTP a request costs more than a match."""

from __future__ import annotations

import asyncio

import msgspec

from sarp_cluster import limits
from sarp_cluster.client.attempts import Attempts
from sarp_cluster.client.errors import CallError, error_of
from sarp_cluster.wire import messages
from sarp_cluster.wire.batching import is_error
from sarp_cluster.wire.codec import decode


class MatchBatches:
    """Gathers matches. Each has its own answer, or its own error."""

    def __init__(self, routers: Attempts) -> None:
        self._routers = routers
        self._waiting: list[tuple[messages.MatchRequest, asyncio.Future[messages.MatchReply]]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self.batches = 0

    async def match(self, request: messages.MatchRequest) -> messages.MatchReply:
        """The answer, of the batch that this turn's matches make."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        future: asyncio.Future[messages.MatchReply] = loop.create_future()
        self._waiting.append((request, future))
        return await future

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), limits.BATCH_ITEMS_MAX):
            task = asyncio.get_running_loop().create_task(self._ask(waiting[begin : begin + limits.BATCH_ITEMS_MAX]))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _ask(self, batch: list[tuple[messages.MatchRequest, asyncio.Future[messages.MatchReply]]]) -> None:
        answers: list[messages.MatchReply | CallError]
        try:
            if len(batch) == 1:
                request = batch[0][0]
                answers = [await self._routers.ask("match", request, request.deadline_ms)]
            else:
                self.batches += 1
                items: list[messages.BatchItem] = [request for request, _ in batch]
                # A batch waits for its slowest item, so it has the shortest deadline of all.
                deadline_ms = min(request.deadline_ms for request, _ in batch)
                reply = await self._routers.ask("batch", messages.BatchRequest(items=items), deadline_ms)
                answers = [_read(raw) for raw in reply.results]
        except CallError as error:
            answers = list[messages.MatchReply | CallError]([error] * len(batch))
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, CallError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _read(raw: msgspec.Raw) -> messages.MatchReply | CallError:
    if is_error(raw):
        return error_of(decode(raw, messages.ErrorReply).error)
    return decode(raw, messages.MatchReply)
