"""A coordinator, shards and routers in one simulated loop: the real services, on a network and a clock that are not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from coordinator.app import CoordinatorService, CoordinatorSettings
from router.app import RouterService
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import SarpError
from sarp_cluster.testing.simulated_disk import SimulatedDisk
from sarp_cluster.testing.simulated_loop import Node, SimulatedLoop
from sarp_cluster.wire.auth import Authenticator, node_token
from sarp_cluster.wire.node import NodeSettings
from shard.app import ShardService

SECRET = b"the secret of a simulated cluster"
HOST = "sim"
COORDINATOR = (HOST, 1)
CONFIG = IndexConfig(segment_blocks=8, base_points=2, snapshot_log_bytes=16_384, log_file_bytes=65_536)


class SimulatedCluster:
    """The nodes by name, and what starts them."""

    def __init__(
        self, loop: SimulatedLoop, directory: Path, *, shards: int = 3, routers: int = 2, splits: dict[int, int]
    ) -> None:
        self.loop = loop
        self.directory = directory
        self.shards = [f"shard-{number}" for number in range(shards)]
        self.routers = [f"router-{number}" for number in range(routers)]
        self.names = ["coordinator", *self.shards, *self.routers]
        self.splits = splits
        self.nodes: dict[str, Node] = {}
        self.services: dict[str, Any] = {}
        self.buried: list[Node] = []
        self.failures: list[str] = []

    def port(self, name: str) -> int:
        """Of its stream."""
        return 1 + self.names.index(name)

    def start(self, name: str) -> None:
        """Start a node's process."""
        node = self.nodes[name] = Node(name)
        disk = SimulatedDisk(node)
        settings = NodeSettings(
            node=name,
            directory=self.directory / name,
            secret=SECRET,
            host=HOST,
            http_port=1000 + self.port(name),
            stream_port=self.port(name),
            coordinators=(COORDINATOR,),
            authenticator=Authenticator([], node_token(SECRET)),
        )

        async def main() -> None:
            service: Any
            if name == "coordinator":
                own = CoordinatorSettings(expected=len(self.shards), splits=self.splits)
                service = CoordinatorService(settings, own, file_system=disk)
            elif name in self.shards:
                service = ShardService(settings, CONFIG, file_system=disk)
            else:
                service = RouterService(settings, file_system=disk)
            self.services[name] = service
            try:
                status = await service.run(asyncio.Event())
            except (SarpError, OSError) as error:
                status = f"{error!r}"
            if not node.buried:
                self.failures.append(f"{self.loop.time():.3f} {name} ended by itself: {status}")

        node.tasks.append(self.loop.start(node, main))

    def start_all(self) -> None:
        """Start every node."""
        for name in self.names:
            self.start(name)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        node = self.nodes[name]
        if not node.dead:
            self.loop.kill(node)
            self.buried.append(node)

    async def end(self) -> None:
        """Kill everything, and leave nothing behind."""
        for name in self.names:
            if name in self.nodes:
                self.kill(name)
        await self.loop.bury(self.buried)

    def ready(self, name: str) -> bool:
        """Does the node run and serve?"""
        node, service = self.nodes.get(name), self.services.get(name)
        return node is not None and not node.dead and not node.paused and service is not None and not service.ready()


class Nemesis:
    """Does to a cluster what a seed says, and says what it does."""

    def __init__(self, cluster: SimulatedCluster, seed: object) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/nemesis")
        self.story: list[str] = []

    def _tell(self, what: str) -> None:
        self.story.append(f"{self._cluster.loop.time():.3f} {what}")

    async def run(self, seconds: float) -> None:
        """For so long; then heal everything."""
        loop = self._cluster.loop
        ends = loop.time() + seconds
        pending: set[asyncio.Task[None]] = set()
        acts = (self._kill, self._kill, self._pause, self._cut, self._cut)
        while loop.time() < ends:
            await asyncio.sleep(self._rng.uniform(0.3, 3.0))
            task = loop.create_task(self._rng.choice(acts)())
            pending.add(task)
            task.add_done_callback(pending.discard)
        if pending:
            await asyncio.wait(pending)
        self._tell("healed")

    async def _kill(self) -> None:
        cluster = self._cluster
        name = self._rng.choice([*cluster.shards * 2, *cluster.names])
        if cluster.nodes[name].dead or cluster.nodes[name].paused:
            return
        self._tell(f"kill {name}")
        cluster.kill(name)
        await asyncio.sleep(self._rng.uniform(0.1, 3.0))
        self._tell(f"start {name}")
        cluster.start(name)

    async def _pause(self) -> None:
        cluster = self._cluster
        name = self._rng.choice(cluster.names)
        node = cluster.nodes[name]
        if node.dead or node.paused:
            return
        self._tell(f"pause {name}")
        cluster.loop.pause(node)
        await asyncio.sleep(self._rng.uniform(0.1, 8.0))
        self._tell(f"resume {name}")
        cluster.loop.resume(node)

    async def _cut(self) -> None:
        cluster = self._cluster
        one, other = self._rng.sample(cluster.names, 2)
        ways = {(one, other)} if self._rng.random() < 0.3 else {(one, other), (other, one)}
        self._tell(f"cut {sorted(ways)}")
        cluster.loop.cut |= ways
        await asyncio.sleep(self._rng.uniform(0.2, 6.0))
        self._tell(f"join {sorted(ways)}")
        cluster.loop.cut -= ways
