"""An event loop that never waits: its clock goes on by itself, and chance comes from a seed.

So a workload with timers, helper threads and several tasks runs as fast as it can, and again in the same order.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from tests.property.scheduling import Delay, ScheduledLoop

T = TypeVar("T")

TURN_S: Final = 0.0005
"""What a turn of the loop takes: ten turns, and the log writes what has gathered."""
DELAY_TURNS_MAX: Final = 4


class _Selector(selectors.DefaultSelector):
    """Lets time pass instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or TURN_S
        return super().select(None if timeout is None else 0)  # None: only a thread can wake the loop


class VirtualTimeLoop(ScheduledLoop):
    """A ScheduledLoop with a clock of its own; helper threads answer some turns late, in an order drawn by the seed."""

    def __init__(self, seed: object) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self.schedule = _delays(random.Random(f"{seed}/delays"))

    def time(self) -> float:
        """Seconds since the loop began."""
        return self._clock.now


def _delays(rng: random.Random) -> Iterator[Delay]:
    while True:
        yield Delay(rng.randint(0, DELAY_TURNS_MAX), late=rng.random() < 0.5)


def run(main: Callable[[], Coroutine[Any, Any, T]], seed: object = 0) -> T:
    """Run something to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main())
