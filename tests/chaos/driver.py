"""The load of a chaos run, in a process of its own: workers that change what they hold, and others that only match.

    python -m tests.chaos.driver LEDGER SEED URL...      URLs of routers, http:// and sarp:// mixed

Told by lines on stdin: `phase NAME` (of what follows), `probe NAME` (match what one worker holds all the time), `sweep
NAME` (finish, then match all that was ever inserted), `end`. Each is answered by a line on stdout once it is done.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from sarp_cluster.errors import ConnectionLostError
from sarp_cluster.wire import messages
from sarp_cluster.wire.faults import RemoteError
from tests.chaos.ledger import Asked, Begun, Ended, Kind, Ledger, Tried
from tests.chaos.routers import HttpRouter, Router, Routers, StreamRouter, call_any
from tests.chaos.workload import SPEC, Session, sessions

WRITERS: Final = 8
MATCHERS: Final = 4
STEADY_SESSIONS: Final = 120
"""Held from the beginning by a worker that removes nothing: what is found of these before and behind is compared."""
STEADY: Final = "steady"
OPEN_SESSIONS: Final = 24
"""Conversations that a writer has at a time."""
REMOVE_ODDS: Final = 0.06
CLEAR_ODDS: Final = 0.006
GIVE_UP_ODDS: Final = 0.3
"""Of a change that was refused as not applied: then it must never be seen."""
THINK_S: Final = 0.02
MATCH_DEADLINE_MS: Final = 500
CHANGE_DEADLINE_MS: Final = 2_000
CONTROL_LIMIT_S: Final = 8.0
"""A change without a key may take the 5 s that the coordinator waits for shards that are not down."""
SLACK_S: Final = 1.0
"""What an answer may be late on a machine that does much else."""
SWEEPERS: Final = 8
SETUP_S: Final = 20.0


class Driver:
    """All that the tasks share."""

    def __init__(self, every: Sequence[Session], ledger: Ledger, seed: int, routers: Sequence[Router]) -> None:
        self.every = every
        self.ledger = ledger
        self.seed = seed
        self.routers = routers
        self.namespace = ""
        self.phase = "setup"
        self.going = asyncio.Event()
        self.stopping = False
        self.inserted: dict[int, int] = {}
        """Session -> blocks that were inserted of it at some time."""
        self.steady: dict[int, int] = {}
        """Those that one worker holds all the time."""
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    # --- one request --------------------------------------------------------------------------------------------------

    async def match(self, routers: Routers, session: int, blocks: int, phase: str = "") -> None:
        """Ask, and note the answer."""
        request = messages.MatchRequest(
            namespace=self.namespace, block_ids=self.every[session].prefix(blocks), deadline_ms=MATCH_DEADLINE_MS
        )
        phase, began = phase or self.phase, time.monotonic()
        failed, reply = "", None
        try:
            reply = await routers.ask("match", request, messages.MatchReply, MATCH_DEADLINE_MS / 1000 + SLACK_S)
        except RemoteError as error:
            failed = str(error)
        except TimeoutError:
            failed = f"no answer within {time.monotonic() - began:.2f} s"
        about = Asked(
            began=began,
            ended=time.monotonic(),
            phase=phase,
            session=session,
            blocks=blocks,
            wire=routers.wire,
            failed=failed,
            matched=reply.matched_blocks if reply else 0,
            workers={one.worker: one.remote for one in reply.workers} if reply else {},
            complete=reply.complete if reply else False,
            degraded=tuple(reply.degraded) if reply else (),
        )
        self.ledger.write(about)

    async def settle(
        self, begun: Begun, ask: Callable[[], Awaitable[int]], rng: random.Random, limit_s: float
    ) -> int | None:
        """Have a change made: ask until it is, or is refused and given up. What `ask` returns; None: given up."""
        self.ledger.write(begun)
        unknown = False
        while True:
            tried = time.monotonic()
            try:
                result = await ask()
            except RemoteError as error:
                code, outcome = error.code, error.body.outcome or "none"
                if code in ("bad_request", "stale_generation", "unknown_worker", "unknown_namespace", "internal"):
                    raise AssertionError(f"{begun}: {error}") from error
                pause_s = min(error.body.retry_after_ms or 50, 300) / 1000
            except (TimeoutError, ConnectionLostError) as error:
                code, outcome, pause_s = type(error).__name__, "unknown", 0.05
            else:
                self.ledger.write(Ended(number=begun.number, at=time.monotonic(), how="acked", generation=result))
                return result
            now = time.monotonic()
            self.ledger.write(
                Tried(number=begun.number, at=now, took_s=now - tried, limit_s=limit_s, code=code, outcome=outcome)
            )
            unknown = unknown or outcome != "not_applied"
            if not unknown and rng.random() < GIVE_UP_ODDS:
                self.ledger.write(Ended(number=begun.number, at=time.monotonic(), how="refused"))
                return None
            await asyncio.sleep(pause_s)

    # --- pausing ------------------------------------------------------------------------------------------------------

    async def turn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do one thing, unless all is to rest."""
        await self.going.wait()
        self._busy += 1
        self._idle.clear()
        try:
            await work()
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def rest(self) -> None:
        """Until nothing is under way."""
        self.going.clear()
        await self._idle.wait()

    async def probe(self, phase: str, wanted: Iterable[tuple[int, int]]) -> None:
        """Match these sessions' first blocks."""
        waiting = list(wanted)

        async def some(number: int) -> None:
            routers = Routers(self.routers, number)
            while waiting:
                await self.match(routers, *waiting.pop(), phase)

        await asyncio.gather(*(some(number) for number in range(SWEEPERS)))

    async def sweep(self, phase: str) -> None:
        """Match all that was ever inserted, while nothing changes."""
        await self.rest()
        await self.probe(phase, self.inserted.items())


class Worker:
    """One worker: its changes follow one another."""

    def __init__(self, driver: Driver, name: str, number: int, mine: Sequence[int]) -> None:
        self.driver = driver
        self.name = name
        self.rng = driver.rng(name)
        self.routers = Routers(driver.routers, number)
        self.generation = 0
        self.seq = 0
        self._waiting = list(mine)
        self.rng.shuffle(self._waiting)
        self._turns: dict[int, int] = {}
        """Open conversation -> its next turn."""
        self._held: dict[int, int] = {}
        """Session -> blocks that it holds of it, from the first."""

    async def step(self) -> None:
        """One turn of a conversation, a removal or a clear."""
        drawn = self.rng.random()
        if drawn < CLEAR_ODDS:
            await self.clear()
        elif drawn < CLEAR_ODDS + REMOVE_ODDS and self._held:
            await self.remove(self.rng.choice(sorted(self._held)))
        else:
            await self.converse()
        await asyncio.sleep(self.rng.expovariate(1 / THINK_S))

    async def converse(self) -> None:
        """Match the context of the next turn, then hold its sequence."""
        while len(self._turns) < OPEN_SESSIONS and self._waiting:
            self._turns[self._waiting.pop()] = 0
        session = self.rng.choice(list(self._turns))
        turn = self.driver.every[session].turns[self._turns[session]]
        if turn.context:
            await self.driver.match(self.routers, session, turn.context)
        if (turn.sequence and await self.hold(session, turn.sequence)) or not turn.sequence:
            self._turns[session] += 1
        if self._turns[session] == len(self.driver.every[session].turns):
            del self._turns[session]
            self._waiting.insert(0, session)  # once more, when all others were

    async def hold(self, session: int, blocks: int) -> bool:
        """Hold a session's first blocks. False: refused."""
        first = min(self._held.get(session, 0), blocks - 1)
        if not await self._change("insert", session, first, blocks):
            return False
        self._held[session] = max(blocks, self._held.get(session, 0))
        return True

    async def remove(self, session: int) -> None:
        """Hold a session no longer from some block on."""
        held = self._held[session]
        first = self.rng.randrange(held)
        if await self._change("remove", session, first, held):
            if first:
                self._held[session] = first
            else:
                del self._held[session]

    async def _change(self, kind: Kind, session: int, first: int, last: int) -> bool:
        driver = self.driver
        driver.inserted[session] = max(last, driver.inserted.get(session, 0))
        self.seq += 1
        begun = Begun(
            number=driver.ledger.number(),
            at=time.monotonic(),
            worker=self.name,
            kind=kind,
            session=session,
            first=first,
            last=last,
            generation=self.generation,
        )
        sent: dict[str, Any] = {
            "namespace": driver.namespace,
            "block_ids": driver.every[session].prefix(last),
            "worker": self.name,
            "generation": self.generation,
            "first": first,
            "seq": self.seq,
            "deadline_ms": CHANGE_DEADLINE_MS,
        }
        limit_s = CHANGE_DEADLINE_MS / 1000 + SLACK_S

        async def ask() -> int:
            if kind == "insert":
                request = messages.InsertRequest(**sent)
                await self.routers.ask("insert", request, messages.InsertReply, limit_s, again=False)
            else:
                request_ = messages.RemoveRequest(**sent)
                await self.routers.ask("remove", request_, messages.RemoveReply, limit_s, again=False)
            return 0

        return await driver.settle(begun, ask, self.rng, limit_s) is not None

    async def clear(self) -> None:
        """Hold nothing any more."""
        driver = self.driver
        begun = Begun(
            number=driver.ledger.number(),
            at=time.monotonic(),
            worker=self.name,
            kind="clear",
            generation=self.generation,
        )

        async def ask() -> int:
            request = messages.ClearRequest(worker=self.name)
            routers = self.routers
            reply = await routers.ask("clear_worker", request, messages.WorkerReply, CONTROL_LIMIT_S, again=False)
            return reply.generation

        generation = await driver.settle(begun, ask, self.rng, CONTROL_LIMIT_S)
        if generation is not None:
            self.generation = generation
            self._held.clear()
            self.seq = 0


async def hold_steadily(driver: Driver, held: Sequence[int]) -> None:
    """A worker that holds some sessions from the beginning to the end."""
    worker = Worker(driver, STEADY, 0, ())
    for session in held:
        await worker.hold(session, driver.every[session].blocks)
    driver.steady = {session: driver.every[session].blocks for session in held}


async def keep_matching(driver: Driver, number: int) -> None:
    """Match what somebody may hold, and beginnings of it."""
    rng = driver.rng(f"matcher {number}")
    routers = Routers(driver.routers, number)

    async def one() -> None:
        if driver.inserted:
            session, blocks = rng.choice(list(driver.inserted.items()))
            await driver.match(routers, session, rng.randint(1, blocks) if rng.random() < 0.3 else blocks)
        await asyncio.sleep(rng.expovariate(1 / THINK_S))

    while not driver.stopping:
        await driver.turn(one)


async def keep_working(driver: Driver, worker: Worker) -> None:
    """Steps, for ever."""
    while not driver.stopping:
        await driver.turn(worker.step)


async def obey(driver: Driver) -> None:
    """Do what stdin says."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        match line:
            case ["phase", name]:
                driver.phase = name
            case ["probe", name]:
                await driver.probe(name, driver.steady.items())
            case ["sweep", name]:
                await driver.sweep(name)
            case _:
                break
        print(json.dumps(line), flush=True)  # noqa: T201
    driver.stopping = True
    driver.going.set()


async def drive(ledger: Ledger, seed: int, urls: Sequence[str]) -> None:
    """Run until told to end."""
    every = await asyncio.to_thread(sessions)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        routers: list[Router] = []
        keeping = []
        for url in urls:
            if url.startswith("http"):
                routers.append(HttpRouter(session, url))
            else:
                stream = StreamRouter(url)
                keeping.append(group.create_task(stream.run()))
                routers.append(stream)
        driver = Driver(every, ledger, seed, routers)
        made = messages.NamespaceRequest(model=SPEC.model, hash_profile=SPEC.hash_profile)
        driver.namespace = (
            await call_any(routers, "create_namespace", made, messages.NamespaceReply, SETUP_S)
        ).namespace
        numbers = list(range(len(every)))
        driver.rng("sessions").shuffle(numbers)
        workers = [Worker(driver, f"writer-{number}", number, numbers[number::WRITERS]) for number in range(WRITERS)]
        for name in (STEADY, *(worker.name for worker in workers)):
            await call_any(
                routers, "register_worker", messages.RegisterRequest(worker=name), messages.WorkerReply, SETUP_S
            )
        await hold_steadily(driver, numbers[:STEADY_SESSIONS])
        driver.going.set()
        print(json.dumps(["ready"]), flush=True)  # noqa: T201
        async with asyncio.TaskGroup() as working:
            working.create_task(obey(driver))
            for worker in workers:
                working.create_task(keep_working(driver, worker))
            for number in range(MATCHERS):
                working.create_task(keep_matching(driver, number))
        for task in keeping:
            task.cancel()


def main() -> int:
    """Run the driver."""
    path, seed, *urls = sys.argv[1:]
    ledger = Ledger(Path(path))
    try:
        asyncio.run(drive(ledger, int(seed), urls))
    finally:
        ledger.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
