"""Faults by a seed: processes of a cluster are killed, or stopped for a while. And who could not answer when.

Each fault is written down before it is made. The faults of a seed are always the same ones, at the same times from the
beginning of the run; what they meet is not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from sarp_cluster import limits
from sarp_cluster.up import LocalCluster
from tests.chaos.check import Fault

PAUSE_S: Final = (2.0, 5.0)
STOP_S_MAX: Final = 3 * limits.PROBE_MS / 1000
LOOK_S: Final = 0.1
LOOK_LIMIT_S: Final = 0.5
GRACE_S: Final = 0.5
"""For which a shard that is ready again is excused still: routers look for it each SHARD_RECONNECT_MS_MAX."""


class Blow(NamedTuple):
    """One fault."""

    after_s: float
    """Since the one before."""
    node: str
    stop_s: float
    """Stopped for so long; 0: killed."""

    def __str__(self) -> str:
        return f"{self.node} stopped for {self.stop_s:.2f} s" if self.stop_s else f"{self.node} killed"


def blows(seed: int, shards: int, routers: int) -> Iterator[Blow]:
    """The faults of a seed, without an end: the first ones meet a shard either way."""
    rng = random.Random(f"nemesis {seed}")
    for number in range(1_000_000):
        kind = rng.random()
        after_s = rng.uniform(*PAUSE_S) if number else 0.5
        stop_s = rng.uniform(0.3, STOP_S_MAX)
        shard = f"shard-{rng.randrange(shards)}"
        if number < 2 or kind < 0.7:
            kill = number == 0 or (number > 1 and rng.random() < 0.5)
            yield Blow(after_s, shard, 0.0 if kill else stop_s)
        elif kind < 0.85:
            yield Blow(after_s, "coordinator", 0.0 if rng.random() < 0.5 else stop_s)
        else:
            yield Blow(after_s, f"router-{rng.randrange(routers)}", 0.0)


class Nemesis:
    """Makes the faults, and watches whom they hit."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self._cluster = cluster
        self._blows = blows(seed, len(cluster.ports.shards), len(cluster.ports.routers))
        self._stopped: dict[int, tuple[str, asyncio.TimerHandle]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._away: dict[str, float] = {}
        """Since when a node cannot answer, as far as we know."""
        self.faults: list[Fault] = []
        self.log: list[str] = []

    async def __aenter__(self) -> Nemesis:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_LIMIT_S))
        places = {f"shard-{number}": http for number, (http, _) in enumerate(self._cluster.ports.shards)}
        places |= {f"router-{number}": http for number, (http, _) in enumerate(self._cluster.ports.routers)}
        self._watching = [asyncio.create_task(self._watch(node, http)) for node, http in places.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- faults -------------------------------------------------------------------------------------------------------

    async def rage(self, seconds: float) -> None:
        """Faults for so long; then none is going on, but not all have healed."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        for blow in self._blows:
            if loop.time() + blow.after_s > ends:
                break
            await asyncio.sleep(blow.after_s)
            await self.strike(blow)
        await asyncio.sleep(max(0.0, ends - loop.time()))
        self.release()

    async def strike(self, blow: Blow) -> None:
        """Make one fault."""
        pid = await asyncio.to_thread(self._pid, blow.node)
        if pid is None:
            self._note(f"{blow}: it is not there")
            return
        self._note(f"{blow}, process {pid}")
        if blow.node != "coordinator":  # without it all others answer as before
            self._away.setdefault(blow.node, time.monotonic())
        self._send(pid, signal.SIGSTOP if blow.stop_s else signal.SIGKILL)
        if blow.stop_s:
            if pid in self._stopped:
                self._stopped[pid][1].cancel()
            timer = asyncio.get_running_loop().call_later(blow.stop_s, self._go_on, pid)
            self._stopped[pid] = blow.node, timer

    def release(self) -> None:
        """Let all that are stopped go on."""
        for pid in list(self._stopped):
            self._go_on(pid)

    def _go_on(self, pid: int) -> None:
        node, timer = self._stopped.pop(pid)
        timer.cancel()
        self._note(f"{node} goes on, process {pid}")
        self._send(pid, signal.SIGCONT)

    def _pid(self, node: str) -> int | None:
        """Of a process that is one of the cluster's: a pid may be another's by now."""
        pid = self._cluster.shard_pid(node) if node.startswith("shard") else self._cluster.pid(node)
        try:
            here = pid and str(self._cluster.directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            here = False
        return pid if here else None

    @staticmethod
    def _send(pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended by itself

    def _note(self, what: str) -> None:
        self.log.append(f"{time.monotonic():.3f} {what}")

    # --- who can answer -----------------------------------------------------------------------------------------------

    async def _watch(self, node: str, http: int) -> None:
        """Note from when to when a node could not answer."""
        assert self._session is not None
        while True:
            looked = time.monotonic()
            try:
                async with self._session.get(f"http://127.0.0.1:{http}/readyz") as response:
                    ready = response.ok
            except (aiohttp.ClientError, TimeoutError):
                ready = False
            if not ready:
                self._away.setdefault(node, looked - LOOK_S)
            elif node in self._away and looked > self._away[node] and not self._is_stopped(node):
                shard = "*" if node.startswith("router") else node
                self.faults.append(Fault(shard, self._away.pop(node), time.monotonic() + GRACE_S))
            await asyncio.sleep(LOOK_S)

    def _is_stopped(self, node: str) -> bool:
        return any(node == stopped for stopped, _ in self._stopped.values())

    async def healed(self, timeout_s: float) -> None:
        """Until everybody can answer, and was excused for the last time."""
        async with asyncio.timeout(timeout_s):
            while self._away:
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(GRACE_S)

    def save(self, path: Path) -> None:
        """The faults, for the checker; one that has not ended lasts."""
        lasting = [Fault("*" if "router" in node else node, since, 1e18) for node, since in self._away.items()]
        path.write_text(json.dumps([*self.faults, *lasting]))
