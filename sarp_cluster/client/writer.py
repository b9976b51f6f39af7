"""Writes what one worker's cache does: in order, numbered, each change until it is answered (design §6).

A shard remembers the highest seq of a worker that it applied, and takes that and lower ones for repetitions. So:

  W1  changes are sent in the order in which they were given, and none before those before it are answered; those that
      wait may go together, in one batch, whose items for a shard run in their order;
  W2  every attempt has new seqs, higher than all before: what is late of an earlier one is a repetition then, and
      cannot undo what came after it;
  W3  of a batch, an item that failed and may be tried again ends what counts as done: it and all behind it are sent
      again, in their order. What was applied already is applied once more, which changes nothing in the end;
  W4  a change is answered when it was applied, or refused for good.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from sarp_cluster import limits
from sarp_cluster.client.attempts import RetryBudget
from sarp_cluster.client.errors import CallError, RefusedError
from sarp_cluster.client.requests import Integers, Namespace, insert_request, remove_request
from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire import messages

SEQ_USED: Final = "seq_used"


class Sender(Protocol):
    """What a writer needs of a client."""

    @property
    def budget(self) -> RetryBudget:
        """For retries."""

    async def send(self, request: Any, *, again: bool = False) -> Any:  # noqa: ANN401
        """Send one change, once."""

    async def batch(self, items: Sequence[messages.BatchItem], *, again: bool = False) -> Sequence[Any]:
        """Send several: for each its reply or CallError."""


class _Waiting:
    """A change, and who waits for its reply."""

    __slots__ = ("reply", "request")

    def __init__(self, request: messages.InsertRequest | messages.RemoveRequest, reply: asyncio.Future[Any]) -> None:
        self.request = request
        self.reply = reply

    @property
    def bytes(self) -> int:
        """Of its blocks, about."""
        return sum(len(ids) for ids in (self.request.block_ids, self.request.token_ids) if isinstance(ids, bytes))


class WorkerWriter:
    """Make one with `AsyncClient.writer`. Whoever stops waiting for a change does not take it back."""

    def __init__(
        self,
        sender: Sender,
        worker: messages.WorkerName,
        *,
        generation: int = 0,
        first_seq: int | None = None,
        sleep: Callable[[float], Any] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._sender = sender
        self._worker = (worker.worker, worker.dp_rank)
        self._generation = generation
        self._seq = int(time.time() * 1e6) if first_seq is None else first_seq
        if not 0 <= self._seq <= limits.SEQ_MAX:
            raise BadRequestError(f"first_seq: {first_seq} is not in 0..{limits.SEQ_MAX}", field="first_seq")
        self._sleep = sleep
        self._chance = chance
        self._queue: deque[_Waiting] = deque()  # bounded by _room
        self._room = asyncio.Semaphore(limits.WRITER_QUEUE_MAX)
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._running: asyncio.Task[None] | None = None
        self.retries = 0
        """Times that changes were sent again."""

    async def __aenter__(self) -> WorkerWriter:
        self._running = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
            for waiting in self._queue:
                waiting.reply.cancel()

    @property
    def waiting(self) -> int:
        """Changes that are not answered yet."""
        return len(self._queue)

    async def flush(self) -> None:
        """Until every change given so far is answered. As long as the cluster does not answer: put a timeout around."""
        empty = asyncio.ensure_future(self._empty.wait())
        ended = [empty] if self._running is None else [empty, self._running]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            empty.cancel()
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    async def insert(
        self,
        namespace: Namespace | str,
        *,
        tokens: Integers | None = None,
        block_ids: Integers | None = None,
        tier: messages.TierName = "gpu",
        first: int = 0,
        offset: int = 0,
        root: bytes | int | None = None,
        handle: int | None = None,
        durable: bool = True,
        deadline_ms: int = limits.INSERT_DEADLINE_MS,
    ) -> messages.InsertReply:
        """The worker newly holds the blocks from position `first` on. `deadline_ms` is that of one attempt."""
        request = insert_request(
            namespace,
            worker=self._worker,
            tokens=tokens,
            block_ids=block_ids,
            generation=self._generation,
            tier=tier,
            first=first,
            offset=offset,
            root=root,
            handle=handle,
            durable=durable,
            deadline_ms=deadline_ms,
        )
        reply: messages.InsertReply = await self._change(request)
        return reply

    async def remove(
        self,
        namespace: Namespace | str,
        *,
        tokens: Integers | None = None,
        block_ids: Integers | None = None,
        tier: messages.TierName | None = None,
        first: int = 0,
        last: int | None = None,
        durable: bool = True,
        deadline_ms: int = limits.INSERT_DEADLINE_MS,
    ) -> messages.RemoveReply:
        """The worker no longer holds positions [first, last). `deadline_ms` is that of one attempt."""
        request = remove_request(
            namespace,
            worker=self._worker,
            tokens=tokens,
            block_ids=block_ids,
            generation=self._generation,
            tier=tier,
            first=first,
            last=last,
            durable=durable,
            deadline_ms=deadline_ms,
        )
        reply: messages.RemoveReply = await self._change(request)
        return reply

    async def _change(self, request: messages.InsertRequest | messages.RemoveRequest) -> Any:  # noqa: ANN401
        await self._room.acquire()  # first come, first served: the order is that of the calls
        if self._running is None or self._running.done():
            raise BadRequestError("the writer is closed", field="writer")
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._empty.clear()
        self._filled.set()
        return await waiting.reply

    async def _run(self) -> None:
        tries = 0
        try:
            while True:
                await self._filled.wait()
                failure = self._settle(*await self._attempt(again=tries > 0))
                if failure is None:
                    tries = 0
                    continue
                tries += 1
                self.retries += 1
                await self._sleep(self._pause_s(failure, tries))
        except Exception as error:  # a bug: nobody may wait for what is never sent
            for waiting in self._queue:
                if not waiting.reply.done():
                    waiting.reply.set_exception(error)
            raise

    async def _attempt(self, *, again: bool) -> tuple[list[_Waiting], Sequence[Any]]:
        """Send the next changes; their results."""
        together = self._next()
        for waiting in together:
            waiting.request.seq = self._seq
            self._seq += 1
        try:
            if len(together) == 1:
                return together, [await self._sender.send(together[0].request, again=again)]
            return together, await self._sender.batch([one.request for one in together], again=again)
        except CallError as error:
            return together, [error] * len(together)

    def _next(self) -> list[_Waiting]:
        """The oldest changes, as many as may go together."""
        together: list[_Waiting] = []
        size = 0
        for waiting in self._queue:
            size += waiting.bytes
            if together and (len(together) == limits.BATCH_ITEMS_MAX or size > limits.WRITER_BATCH_BYTES_MAX):
                break
            together.append(waiting)
        return together

    def _settle(self, together: Sequence[_Waiting], results: Sequence[Any]) -> CallError | None:
        """Tell those that are answered; returns why the first of the others is not."""
        for waiting, result in zip(together, results, strict=True):
            if isinstance(result, CallError) and not isinstance(result, RefusedError):
                return result
            self._queue.popleft()
            self._room.release()
            if not self._queue:
                self._filled.clear()
                self._empty.set()
            if waiting.reply.done():
                continue
            if isinstance(result, messages.InsertReply | messages.RemoveReply) and not result.applied:
                waiting.reply.set_exception(self._seq_used(waiting))
            elif isinstance(result, CallError):
                waiting.reply.set_exception(result)
            else:
                waiting.reply.set_result(result)
        return None

    def _seq_used(self, waiting: _Waiting) -> RefusedError:
        worker, rank = self._worker
        message = (
            f"seq: {waiting.request.seq} of worker {worker!r} rank {rank} is not above all before: another writer "
            "numbers this worker's changes, or first_seq was too low; the change was not applied"
        )
        return RefusedError(messages.ErrorBody(code=SEQ_USED, message=message, field="seq", outcome="not_applied"))

    def _pause_s(self, failure: CallError, tries: int) -> float:
        """Longer from try to try, by chance, so that not all come back together; never shorter than asked for."""
        longest = limits.WRITER_PAUSE_MS_MAX
        pause_ms: float = min(longest, limits.WRITER_PAUSE_MS_MIN << min(tries - 1, 16))
        pause_ms *= 0.5 + self._chance() / 2
        if not self._sender.budget.take():
            pause_ms = longest
        return max(pause_ms, failure.retry_after_ms or 0) / 1000
