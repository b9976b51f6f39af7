"""Workers and askers of a simulated cluster, and the ledger by which every answer is judged.

A worker sends its changes one after the other and repeats each until it is answered, as design §6 wants. What it did is
noted before and after. An answer is wrong when
  (a) it names a worker for a block that this worker cannot have held at any moment of the match;
  (b) it is complete and shorter than what somebody held, acknowledged, during the whole match;
  (c) it does not come within its deadline and some slack, or is an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec

from sarp_cluster.errors import ConnectionLostError, SarpError
from sarp_cluster.testing.simulated_loop import SimulatedLoop
from sarp_cluster.types import HashProfile
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.stream_client import StreamClient
from tests.cluster.simulated_cluster import HOST, SimulatedCluster

NEVER = float("inf")
SLACK_S = 0.05
DEADLINE_MS = 200
RETRY_S = 0.05


class Held:
    """What one worker may hold, and holds for certain, by block."""

    def __init__(self) -> None:
        self.gone_since: dict[int, float] = {}
        """Since when a block is certainly not held: its removal was acknowledged then."""
        self.sure_since: dict[int, float] = {}
        """Since when it certainly is: its insert was acknowledged then, and no removal has begun since."""
        self.doubt_since: dict[int, float] = {}
        """Since when a block that was certain is not any more."""

    def may_hold(self, block: int, begun: float) -> bool:
        """May it hold the block at some moment since `begun`?"""
        return block in self.gone_since and self.gone_since[block] >= begun

    def holds(self, block: int, begun: float) -> bool:
        """Does it hold it for certain, all the time since `begun`?"""
        return self.sure_since.get(block, NEVER) < begun

    def begin_insert(self, blocks: Sequence[int]) -> None:
        """From now on it may hold them."""
        for block in blocks:
            self.gone_since[block] = NEVER

    def inserted(self, blocks: Sequence[int], now: float) -> None:
        """It was acknowledged."""
        for block in blocks:
            self.sure_since.setdefault(block, now)

    def begin_remove(self, blocks: Sequence[int]) -> None:
        """It is not certain any more."""
        for block in blocks:
            self.sure_since.pop(block, None)

    def removed(self, blocks: Sequence[int], now: float) -> None:
        """It was acknowledged."""
        for block in blocks:
            if block in self.gone_since:
                self.gone_since[block] = now


class Load:
    """All clients of one run."""

    def __init__(self, cluster: SimulatedCluster, loop: SimulatedLoop, seed: object, workers: int = 3) -> None:
        self._cluster = cluster
        self._loop = loop
        self._rng = random.Random(f"{seed}/load")
        self.namespace = ""
        self.sequences = self._make_sequences()
        self.held = {f"w{number}": Held() for number in range(workers)}
        self.matches = self.complete = self.changes = self.clears = 0
        self.stop = False

    def _make_sequences(self) -> list[list[int]]:
        """Sequences that share prefixes, as conversations do: block IDs are chained, so each names its prefix."""
        made: list[list[int]] = []
        for root in range(4):
            trunk = [self._rng.getrandbits(64) for _ in range(self._rng.randint(4, 80))]
            made.append(trunk)
            for _ in range(3):
                at = self._rng.randrange(1, len(trunk))
                made.append(trunk[:at] + [self._rng.getrandbits(64) for _ in range(self._rng.randint(1, 90))])
            assert root < 4
        return made

    async def ask(self, router: str, name: str, message: object, reply: type, timeout_s: float) -> object:
        """One request on a connection of its own; by no node."""
        client = await StreamClient.connect(HOST, self._cluster.port(router), control.Hello(version=1))
        try:
            async with asyncio.timeout(timeout_s):
                return decode(await client.request(name, message), reply)
        finally:
            client.close()

    async def persist(self, name: str, message: Callable[[], object], reply: type) -> object:
        """Until it is answered, whichever router does it."""
        while True:
            router = self._rng.choice(self._cluster.routers)
            try:
                return await self.ask(router, name, message(), reply, 4.0)
            except RemoteError as error:
                if error.code in ("bad_request", "forbidden", "internal", "unknown_worker", "stale_generation"):
                    raise
            except (SarpError, TimeoutError, OSError):
                pass
            await asyncio.sleep(RETRY_S)

    async def prepare(self) -> None:
        """Create the namespace and register the workers."""
        request = messages.NamespaceRequest(model="m", hash_profile=HashProfile.OPAQUE)
        created = await self.persist("create_namespace", lambda: request, messages.NamespaceReply)
        assert isinstance(created, messages.NamespaceReply)
        self.namespace = created.namespace
        for worker in self.held:
            await self.persist(
                "register_worker",
                lambda worker=worker: messages.RegisterRequest(worker=worker),  # type: ignore[misc]
                messages.WorkerReply,
            )

    async def work(self, worker: str) -> None:
        """One worker's changes."""
        rng = random.Random(f"{self._rng.random()}/{worker}")
        held = self.held[worker]
        generation = seq = 0
        while not self.stop:
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            sequence = rng.choice(self.sequences)
            blocks = sequence[: rng.randint(1, len(sequence))]
            seq += 1
            what = rng.random()
            self.changes += 1
            if what < 0.03:
                generation += 1
                self.clears += 1
                every = list(held.gone_since)
                held.begin_remove(every)
                clear = messages.ClearRequest(worker=worker, generation=generation)
                await self.persist("clear_worker", lambda clear=clear: clear, messages.WorkerReply)  # type: ignore[misc]
                held.removed(every, self._loop.time())
                seq = 0
            elif what < 0.25:
                first = rng.randrange(len(blocks))
                gone = blocks[first:]
                held.begin_remove(gone)
                remove = messages.RemoveRequest(
                    namespace=self.namespace,
                    block_ids=blocks,
                    worker=worker,
                    generation=generation,
                    first=first,
                    seq=seq,
                    deadline_ms=1000,
                )
                await self.persist("remove", lambda remove=remove: remove, messages.RemoveReply)  # type: ignore[misc]
                held.removed(gone, self._loop.time())
            else:
                first = rng.randrange(len(blocks)) if rng.random() < 0.3 else 0
                new = blocks[first:]
                held.begin_insert(new)
                insert = messages.InsertRequest(
                    namespace=self.namespace,
                    block_ids=blocks,
                    worker=worker,
                    generation=generation,
                    first=first,
                    seq=seq,
                    deadline_ms=1000,
                )
                await self.persist("insert", lambda insert=insert: insert, messages.InsertReply)  # type: ignore[misc]
                held.inserted(new, self._loop.time())

    async def match(self, sequence: Sequence[int], router: str) -> messages.MatchReply | None:
        """Ask once and judge the answer; None: the router was not there, or was lost."""
        try:
            client = await StreamClient.connect(HOST, self._cluster.port(router), control.Hello(version=1))
        except SarpError:
            return None
        node = self._cluster.nodes[router]
        request = messages.MatchRequest(namespace=self.namespace, block_ids=list(sequence), deadline_ms=DEADLINE_MS)
        begun = self._loop.time()
        sure = {worker: [held.holds(block, begun) for block in sequence] for worker, held in self.held.items()}
        try:
            async with asyncio.timeout(DEADLINE_MS / 1000 + SLACK_S):
                answer = decode(await client.request("match", request), messages.MatchReply)
        except TimeoutError:
            assert node.dead or node.paused or node is not self._cluster.nodes[router] or self._stalled(begun), (
                f"(c) no answer of {router} within {DEADLINE_MS} ms at {self._loop.time():.3f}"
            )
            return None
        except ConnectionLostError:
            return None
        except RemoteError as error:
            # A router that was never ready since it was made has no slot map, or not the namespace.
            if error.code not in ("recovering", "unknown_namespace"):
                raise
            return None
        finally:
            client.close()
        self.matches += 1
        self._judge(sequence, answer, sure, begun)
        return answer

    def _stalled(self, begun: float) -> bool:
        """Did a router's process stand still meanwhile?"""
        return any(at >= begun - 0.001 for at in self._loop.resumed_at)

    def _judge(
        self, sequence: Sequence[int], answer: messages.MatchReply, sure: dict[str, list[bool]], begun: float
    ) -> None:
        for one in answer.workers:
            held = self.held[one.worker]
            for position in range(one.remote):
                assert held.may_hold(sequence[position], begun), (
                    f"(a) {one.worker} is named for block {position} of {one.remote} at {self._loop.time():.3f}, "
                    f"certainly gone since {held.gone_since.get(sequence[position])}, asked at {begun:.3f}"
                )
        if answer.complete:
            self.complete += 1
            least = 0
            for position, block in enumerate(sequence):
                if not any(sure[w][position] and self.held[w].holds(block, begun) for w in self.held):
                    break
                least = position + 1
            assert answer.matched_blocks >= least, (
                f"(b) {answer.matched_blocks} blocks, complete, where {least} are held for certain, at "
                f"{self._loop.time():.3f}, asked at {begun:.3f}: {msgspec.to_builtins(answer)}"
            )

    async def look(self) -> None:
        """Ask again and again."""
        rng = random.Random(f"{self._rng.random()}/look")
        while not self.stop:
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            sequence = rng.choice(self.sequences)
            await self.match(sequence[: rng.randint(1, len(sequence))], rng.choice(self._cluster.routers))
