"""A coordinator, shards and a router in the test's own loop, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from coordinator.app import CoordinatorService, CoordinatorSettings
from router.app import RouterService
from sarp_cluster.config import IndexConfig
from sarp_cluster.up import Ports
from sarp_cluster.wire.auth import Authenticator, Credential, node_token
from sarp_cluster.wire.node import NodeSettings
from shard.app import ShardService

SECRET = b"the secret of some services"


class Services:
    """They run while the block of `services` lasts."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self.shards: list[ShardService] = []
        self.routers: list[RouterService] = []

    @property
    def ready(self) -> bool:
        every: list[ShardService | RouterService] = [*self.shards, *self.routers]
        return all(one.ready() is None for one in every)


def _ports(directory: Path, shards: int) -> Ports:
    """The same again in the same directory: nodes remember where the others were."""
    known = directory / "ports"
    if known.exists():
        return msgspec.json.decode(known.read_bytes(), type=Ports)
    ports = Ports.free(shards, 1)
    known.write_bytes(msgspec.json.encode(ports))
    return ports


@contextlib.asynccontextmanager
async def services(
    directory: Path,
    *,
    shards: int = 2,
    credentials: Sequence[Credential] = (),
    tls: ssl.SSLContext | None = None,
    peer_tls: ssl.SSLContext | None = None,
    coordinators: bool = True,
    only: Sequence[str] | None = None,
    wait: bool = True,
) -> AsyncIterator[Services]:
    """`coordinators`: is there one? `only`: the names of the shards to start. `wait`: until all are ready."""
    one = Services(await asyncio.to_thread(_ports, directory, shards))
    http, stream = one.ports.coordinator

    def settings(name: str, ports: tuple[int, int]) -> NodeSettings:
        return NodeSettings(
            node=name,
            directory=directory / name,
            secret=SECRET,
            http_port=ports[0],
            stream_port=ports[1],
            coordinators=(("127.0.0.1", stream),),
            authenticator=Authenticator(credentials, node_token(SECRET)),
            tls=tls,
            peer_tls=peer_tls,
        )

    coordinator = CoordinatorService(settings("coordinator", (http, stream)), CoordinatorSettings(expected=shards))
    places = {f"shard-{number}": ports for number, ports in enumerate(one.ports.shards)}
    one.shards = [ShardService(settings(name, places[name]), IndexConfig()) for name in only or places]
    if only is None:
        one.routers = [RouterService(settings("router-0", one.ports.routers[0]))]
    stop = asyncio.Event()
    every: list[CoordinatorService | ShardService | RouterService] = [*one.shards, *one.routers]
    if coordinators:
        every.append(coordinator)
    running = [asyncio.create_task(each.run(stop)) for each in every]
    try:
        async with asyncio.timeout(20):
            while wait and not one.ready:
                assert not any(task.done() for task in running)
                await asyncio.sleep(0.01)
        yield one
    finally:
        stop.set()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*running)
        assert ended == [0] * len(running)
