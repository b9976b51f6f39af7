"""Our HTTP server with nothing behind it: `python -m bench.no_op_server` prints its port and serves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import uvloop

from sarp_cluster.wire import messages, planning
from sarp_cluster.wire.auth import Authenticator, Principal
from sarp_cluster.wire.codec import encode
from sarp_cluster.wire.http_server import HttpServer
from sarp_cluster.wire.service import Handler


class NoOp:
    """See sarp_cluster.wire.service.Service."""

    node = cluster = "no-op"

    def __init__(self) -> None:
        self.authenticator = Authenticator()
        self._reply = msgspec.Raw(encode(planning.nothing(None, 1)))

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """One: it has its answer ready."""
        return {"match": self.match}

    async def match(self, _: Principal, __: messages.MatchRequest) -> msgspec.Raw:
        """Nothing is done."""
        return self._reply

    def ready(self) -> str | None:
        """Always."""
        return None

    def metrics(self) -> str:
        """None."""
        return ""

    def page(self) -> str:
        """None."""
        return ""


async def main() -> None:
    """Serve for ever."""
    server = await HttpServer.start(NoOp(), "127.0.0.1", 0)
    print(server.address[1], flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(main())
