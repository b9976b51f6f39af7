"""An event loop whose helper threads answer when a schedule says so: interleavings are chosen, and can be repeated."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from shard.index import Index

T = TypeVar("T")


class Delay(NamedTuple):
    """How long whoever waits for a job of a helper thread has to wait."""

    turns: int | None = 0
    """Turns of the loop; None: until `release`."""
    late: bool = False
    """The job itself begins only then and reads what is new. Otherwise it runs first and its result grows old."""


class ScheduledLoop(asyncio.SelectorEventLoop):
    """Runs the jobs of all executors in one thread and delivers each result after the delay that the schedule gives it.

    What is left to chance otherwise, which helper thread is done first, follows from the schedule. After its end no job
    is delayed.
    """

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self.schedule: Iterator[Delay] = iter(())
        """One delay a job. May be replaced at any time."""
        self._thread = ThreadPoolExecutor(1)
        self.held: list[Callable[[], object]] = []
        """What waits for `release`."""

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """`func(*args)` in a thread, now or later, and its result after the delay."""
        waiter: asyncio.Future[T] = self.create_future()
        delay = next(self.schedule, Delay())

        def run() -> Future[T]:
            # While the thread works the loop stands still: what happens meanwhile is for the schedule to say.
            job = self._thread.submit(func, *args)
            wait([job])
            return job

        def run_late() -> None:
            self._after(delay.turns, lambda: _deliver(run(), waiter))

        def run_first() -> None:
            job = run()
            self._after(delay.turns, lambda: _deliver(job, waiter))

        # Never at once: it is the loop that waits for the thread, not the code under test.
        self.call_soon(run_late if delay.late else run_first)
        return waiter

    def release(self) -> None:
        """Go on with what was held."""
        for callback in self.held:
            self.call_soon(callback)
        self.held.clear()

    def close(self) -> None:
        """Stop the thread as well."""
        self._thread.shutdown()
        super().close()

    def _after(self, turns: int | None, callback: Callable[[], object]) -> None:
        if turns is None:
            self.held.append(callback)
        elif turns == 0:
            callback()
        else:
            self.call_soon(self._after, turns - 1, callback)


def _deliver(job: Future[T], waiter: asyncio.Future[T]) -> None:
    if waiter.cancelled():
        return
    error = job.exception()
    if error is None:
        waiter.set_result(job.result())
    else:
        waiter.set_exception(error)


def reads_wait(index: Index, *, seed: int = 0, share: float = 1.0) -> AbstractContextManager[object]:
    """Meanwhile this share of the index's reads finds nothing that can be read without waiting for a helper thread."""
    rng = random.Random(seed)  # not for secrets
    read_cached: Callable[[Any], int] = index.store.read_cached

    def read_some(batch: Sized) -> int:
        return len(batch) if rng.random() < share else read_cached(batch)

    return patch.object(index.store, "read_cached", read_some)
