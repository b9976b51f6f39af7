"""Begin a coroutine without a task: most requests are answered before they wait for anything.

A task costs some microseconds and a trip through the event loop. Python 3.12 has eager tasks; this does with 3.11, too.
What runs before the first suspension is in no task, so it must not ask for the current one (`asyncio.timeout` does):
`rest_within` puts a time limit on what suspends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """A coroutine that has run to its first suspension, or to its end."""

    __slots__ = ("_coroutine", "_waiting", "done", "result")

    def __init__(self, started: Coroutine[Any, Any, T]) -> None:
        self._coroutine = started
        try:
            self._waiting = started.send(None)
        except StopIteration as stop:
            self.done = True
            self.result: T = stop.value
            """What it returned; there is none unless `done`."""
        else:
            self.done = False

    async def rest(self) -> T:
        """Go on to the end; in a task."""
        return await _go_on(self._coroutine, self._waiting)

    async def rest_within(self, seconds: float) -> T:
        """Go on to the end, if that comes within so many seconds; else it is cancelled, and TimeoutError is raised."""
        return await asyncio.wait_for(self.rest(), seconds)


@coroutine
def _go_on(started: Coroutine[Any, Any, T], waiting: Any) -> Generator[Any, Any, T]:  # noqa: ANN401  # what it awaits
    """Await what it waits for, and so on; what is thrown at us is thrown at it."""
    while True:
        try:
            value = yield waiting
        except GeneratorExit:
            started.close()
            raise
        except BaseException as error:
            try:
                waiting = started.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        else:
            try:
                waiting = started.send(value)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
