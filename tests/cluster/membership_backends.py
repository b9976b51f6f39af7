"""The backends of membership that the conformance suite runs over, each behind the same few calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import Membership
from sarp_cluster.cluster.redis_address import connect, parse_redis_url
from sarp_cluster.cluster.redis_membership import RedisMembership
from sarp_cluster.storage.record_file import RecordFile
from tests.cluster.redis_server import RedisServer, redis_server


class Backend(Protocol):
    """One set of records, which coordinators open one after the other."""

    async def open(self) -> Membership:
        """As a coordinator does that starts. Whoever opened it closes it."""


class Embedded:
    """Records in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self) -> Membership:
        """See Backend."""
        file = await RecordFile.open(self._path)
        try:
            return await EmbeddedMembership.open(file)
        except BaseException:
            await file.close()
            raise


@asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[Backend]:
    """Records in a file of this directory."""
    yield Embedded(directory / "records")


SECRET: Final = b"the secret of a cluster in Redis"
CLUSTER: Final = "0123456789abcdef"


class InRedis:
    """Records in a Redis."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    async def open(self) -> RedisMembership:
        """See Backend."""
        return RedisMembership(connect(parse_redis_url(self.server.url)), secret=SECRET, cluster=CLUSTER)


@asynccontextmanager
async def in_redis(directory: Path) -> AsyncIterator[Backend]:
    """Records in a Redis that keeps them in this directory."""
    with redis_server(directory) as server:
        yield InRedis(server)


class Factory(Protocol):
    """Makes a backend without records, and takes it away at the end."""

    def __call__(self, directory: Path) -> contextlib.AbstractAsyncContextManager[Backend]:
        """A new one, whose files are in `directory`."""


BACKENDS: Final[dict[str, Factory]] = {"embedded": embedded, "redis": in_redis}
