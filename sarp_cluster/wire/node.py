"""What the three services' processes have in common: settings, both servers, signals (docs/operations.md)."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
import ssl
import stat
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from sarp_cluster.cluster.view import join_address, split_address
from sarp_cluster.core.namespace import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from sarp_cluster.errors import BadRequestError, SarpError
from sarp_cluster.wire.auth import Authenticator, node_token, read_credentials
from sarp_cluster.wire.control import PROTOCOL_VERSION, Hello
from sarp_cluster.wire.http_server import HttpServer
from sarp_cluster.wire.service import Service
from sarp_cluster.wire.stream_server import StreamServer

logger: Final = logging.getLogger(__name__)

EXIT_ERROR: Final = 2
EXIT_POISONED: Final = 3
"""A disk failed in a way that only a restart mends."""
FINISH_S: Final = 5.0
"""What requests in flight have when the process is told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of one process. docs/configuration.md describes each."""

    node: str
    directory: Path
    secret: bytes
    host: str = "127.0.0.1"
    http_port: int = 0
    stream_port: int = 0
    advertise: str = ""
    coordinators: tuple[tuple[str, int], ...] = ()
    authenticator: Authenticator
    tls: ssl.SSLContext | None = None
    """Both wires are served with it."""
    peer_tls: ssl.SSLContext | None = None
    """Other nodes are called with it, where there is one for serving."""
    insecure: bool = False

    def hello(self, cluster: str = "") -> Hello:
        """What this node says first to another of its cluster."""
        return Hello(version=PROTOCOL_VERSION, cluster=cluster, credential=node_token(self.secret), node=self.node)


def add_node_arguments(parser: argparse.ArgumentParser, *, node: str, http_port: int, stream_port: int) -> None:
    """The arguments of a service."""
    parser.add_argument("--name", default=node, help="this node's name in its cluster (default: %(default)s)")
    parser.add_argument("--directory", type=Path, required=True, help="where it keeps what has to last")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=http_port, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--stream-port", type=int, default=stream_port, help="as --http-port (default: %(default)s)")
    parser.add_argument("--advertise", default="", metavar="HOST", help="how other nodes reach it (default: --host)")
    parser.add_argument(
        "--coordinator",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="stream address of a coordinator; once for each",
    )
    parser.add_argument(
        "--cluster-secret",
        type=Path,
        required=True,
        metavar="FILE",
        help="16 to 64 random bytes, the same on all nodes",
    )
    parser.add_argument(
        "--credentials", type=Path, metavar="FILE", help="who may do what (`sarp credential` makes entries)"
    )
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="serve both wires with this certificate chain"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="whom other nodes' certificates have to be signed by (default: the system's)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without credentials: whoever reaches the port may do everything",
    )
    parser.add_argument("--verbose", action="store_true", help="log more")


def node_settings(arguments: argparse.Namespace) -> NodeSettings:
    """The settings of a command line. Raises BadRequestError naming the option; reads files, so call it first."""
    coordinators = []
    for address in arguments.coordinator:
        parts = split_address(address)
        if parts is None:
            raise BadRequestError(f"--coordinator: {address!r} is not HOST:PORT", field="coordinator")
        coordinators.append(parts)
    secret = read_private(arguments.cluster_secret, "--cluster-secret")
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise BadRequestError(
            f"--cluster-secret: {len(secret)} bytes, not {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}",
            field="cluster_secret",
        )
    credentials = []
    if arguments.credentials is not None:
        credentials = read_credentials(read_private(arguments.credentials, "--credentials"))
    if not credentials and not arguments.insecure and not is_loopback(arguments.host):
        raise BadRequestError(
            f"--host: {arguments.host} is reachable from elsewhere and no credentials are configured; give "
            "--credentials, or --insecure if whoever reaches the port may do everything",
            field="host",
        )
    tls = peer_tls = None
    if arguments.tls_certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        tls.load_cert_chain(arguments.tls_certificate, arguments.tls_key)
        peer_tls = ssl.create_default_context(cafile=arguments.tls_ca)
        peer_tls.minimum_version = ssl.TLSVersion.TLSv1_2
    return NodeSettings(
        node=arguments.name,
        directory=arguments.directory,
        secret=secret,
        host=arguments.host,
        http_port=arguments.http_port,
        stream_port=arguments.stream_port,
        advertise=arguments.advertise,
        coordinators=tuple(coordinators),
        authenticator=Authenticator(credentials, node_token(secret)),
        tls=tls,
        peer_tls=peer_tls,
        insecure=arguments.insecure,
    )


def read_private(path: Path, option: str) -> bytes:
    """A file that must be for its owner only."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadRequestError(f"{option}: others may read {path}; chmod 600 it", field=option.strip("-"))
        return path.read_bytes()
    except OSError as error:
        raise BadRequestError(f"{option}: {path}: {error.strerror}", field=option.strip("-")) from error


def is_loopback(host: str) -> bool:
    """Is it an address of this machine alone?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Servers:
    """Both wires of one service."""

    def __init__(self, stream: StreamServer, http: HttpServer, advertise: str) -> None:
        self._stream = stream
        self._http = http
        host, port = stream.address
        self.stream_address = join_address(advertise or host, port)
        host, port = http.address
        self.http_address = join_address(advertise or host, port)

    @classmethod
    async def start(cls, service: Service, settings: NodeSettings) -> Servers:
        """Listen on both."""
        stream = await StreamServer.start(service, settings.host, settings.stream_port, tls=settings.tls)
        try:
            http = await HttpServer.start(service, settings.host, settings.http_port, tls=settings.tls)
        except BaseException:
            await stream.close()
            raise
        return cls(stream, http, settings.advertise)

    async def close(self, finish_s: float = FINISH_S) -> None:
        """Stop listening, finish what is in flight, drop the rest."""
        await asyncio.gather(self._stream.close(finish_s), self._http.close(finish_s))


async def until(stop: asyncio.Event, *work: Coroutine[Any, Any, None]) -> None:
    """Do all of these until `stop` is set or one of them raises, which is raised; the others are cancelled."""
    stopping = asyncio.ensure_future(stop.wait())
    tasks = {asyncio.ensure_future(one) for one in work}
    try:
        running = set(tasks)
        while running and not stopping.done():
            done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & running:
                _result(task)
            running -= done
        if not stopping.done():
            await stopping
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)


def _result(task: asyncio.Future[Any]) -> None:
    """Raise what a task raised: of a group the first, which ended the others."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


class Running(Protocol):
    """A service's process."""

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set; returns the exit status."""


def run_node(make: Callable[[], Running], *, verbose: bool = False) -> int:
    """Run a service's process until SIGTERM or SIGINT; a second signal ends it at once."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )

    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def told(number: int) -> None:
            if stop.is_set():
                logger.warning("told to end a second time: ending at once")
                loop.stop()
            stop.set()
            logger.info("told to end (%s)", signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told, number)
        return await make().run(stop)

    try:
        import uvloop  # noqa: PLC0415  # not on Windows
    except ImportError:
        runner = asyncio.run
    else:
        runner = uvloop.run
    try:
        return runner(main())
    except SarpError as error:
        logger.error("%s", error)
        return EXIT_ERROR
    except RuntimeError as error:
        if "stopped before" in str(error):
            return EXIT_ERROR
        raise


def run_command(
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    *,
    prog: str,
    argv: Sequence[str] | None,
) -> int:
    """Run a service from a command line of its own."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except SarpError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_ERROR
