"""A whole cluster on this machine, in the foreground: what `sarp up` runs (docs/operations.md).

It starts a coordinator, which starts the shards, and routers; and starts each again that ends. When it is told to end,
all of it ends in order: nothing acknowledged is lost either way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from coordinator.child_process import find, send
from sarp_cluster.cluster.redis_address import parse_redis_url
from sarp_cluster.config import read_index_config
from sarp_cluster.errors import BadRequestError, SarpError, UnavailableError

logger: Final = logging.getLogger(__name__)

SECRET_BYTES: Final = 32
RESTART_PAUSE_S: Final = 0.2
RESTART_PAUSE_S_MAX: Final = 5.0
READY_S: Final = 30.0
POLL_S: Final = 0.05
STOP_S: Final = 15.0
ROUTERS_MAX: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where everything listens; each as (HTTP, stream)."""

    coordinator: tuple[int, int]
    routers: Sequence[tuple[int, int]]
    shards: Sequence[tuple[int, int]]

    @classmethod
    def usual(cls, shards: int, routers: int) -> Ports:
        """Those that the documentation names."""
        return cls(
            coordinator=(7099, 7199),
            routers=[(7100, 7200), *((7150 + number, 7250 + number) for number in range(1, routers))],
            shards=[(7101 + number, 7201 + number) for number in range(shards)],
        )

    @classmethod
    def free(cls, shards: int, routers: int) -> Ports:
        """Any that are free now; those of the shards follow one another."""
        with contextlib.ExitStack() as held:
            first = [_free_run(shards, held) for _ in range(2)]
            rest = [(_free_run(1, held), _free_run(1, held)) for _ in range(routers + 1)]
        return cls(
            coordinator=rest[0],
            routers=rest[1:],
            shards=[(first[0] + number, first[1] + number) for number in range(shards)],
        )


def _free_run(count: int, held: contextlib.ExitStack) -> int:
    """The first of so many free ports that follow one another; they are held until `held` is closed."""
    while True:
        with contextlib.ExitStack() as trying:
            probe = trying.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            try:
                for number in range(1, count):
                    trying.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except (OSError, OverflowError):
                continue
            held.enter_context(trying.pop_all())
            return port


@dataclass(slots=True, kw_only=True)
class LocalCluster:
    """The processes. `run` keeps them until it is cancelled."""

    directory: Path
    ports: Ports
    credentials: Path | None = None
    splits: Path | None = None
    redis: str | None = None
    redis_password: Path | None = None
    index: Sequence[str] = ()
    """Settings of the shards' indexes, as NAME=VALUE."""
    verbose: bool = False
    _processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def router_urls(self) -> list[str]:
        """HTTP addresses of the routers."""
        return [f"http://127.0.0.1:{http}" for http, _ in self.ports.routers]

    @property
    def router_streams(self) -> list[str]:
        """Stream addresses of the routers."""
        return [f"sarp://127.0.0.1:{stream}" for _, stream in self.ports.routers]

    @property
    def coordinator_url(self) -> str:
        """HTTP address of the coordinator."""
        return f"http://127.0.0.1:{self.ports.coordinator[0]}"

    @property
    def secret_file(self) -> Path:
        """The cluster's secret."""
        return self.directory / "secret"

    def _pid_file(self, shard: str) -> Path:
        return self.directory / "coordinator" / "shards" / f"{shard}.pid"

    def shard_pid(self, shard: str) -> int | None:
        """The process of a shard, as its supervisor has noted it."""
        try:
            noted = json.loads(self._pid_file(shard).read_bytes())
            return int(noted["pid"])
        except (OSError, ValueError, KeyError):
            return None

    def pid(self, name: str) -> int | None:
        """The process of a router or of the coordinator."""
        process = self._processes.get(name)
        return None if process is None or process.returncode is not None else process.pid

    def _commands(self) -> dict[str, list[str]]:
        secret = str(self.secret_file.resolve())
        common = ["--cluster-secret", secret, *(["--verbose"] if self.verbose else [])]
        if self.credentials is not None:
            common += ["--credentials", str(self.credentials.resolve())]
        http, stream = self.ports.coordinator
        coordinator = [
            *(sys.executable, "-m", "coordinator", "--directory", str(self.directory / "coordinator")),
            *("--http-port", str(http), "--stream-port", str(stream)),
            *("--shards", str(len(self.ports.shards)), "--stop-shards"),
            *("--shard-http-port", str(self.ports.shards[0][0]), "--shard-stream-port", str(self.ports.shards[0][1])),
            *common,
        ]
        if self.redis is not None:
            coordinator += ["--redis", self.redis]
        if self.redis_password is not None:
            coordinator += ["--redis-password", str(self.redis_password.resolve())]
        for setting in self.index:
            coordinator += ["--index", setting]
        if self.splits is not None:
            coordinator += ["--splits", str(self.splits.resolve())]
        commands = {"coordinator": coordinator}
        for number, (router_http, router_stream) in enumerate(self.ports.routers):
            name = f"router-{number}"
            commands[name] = [
                *(sys.executable, "-m", "router", "--name", name, "--directory", str(self.directory / name)),
                *("--http-port", str(router_http), "--stream-port", str(router_stream)),
                *("--coordinator", f"127.0.0.1:{stream}"),
                *common,
            ]
        return commands

    def prepare(self) -> None:
        """Make the directory, and the cluster's secret if there is none."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.secret_file.exists():
            descriptor = os.open(self.secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())

    async def run(self) -> None:
        """Start everything, and again what ends, until cancelled; then end it in order."""
        await asyncio.to_thread(self.prepare)
        commands = await asyncio.to_thread(self._commands)
        keepers = [asyncio.create_task(self._keep(name, command)) for name, command in commands.items()]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            # Routers first: they send nothing more to shards that are about to end.
            await asyncio.gather(*(self._stop(name) for name in commands if name != "coordinator"))
            await self._stop("coordinator")
            await asyncio.gather(*(self._end_orphan(f"shard-{number}") for number in range(len(self.ports.shards))))

    async def _keep(self, name: str, command: list[str]) -> None:
        pause_s = RESTART_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            log = await asyncio.to_thread((self.directory / f"{name}.log").open, "ab")
            try:
                began = loop.time()
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            finally:
                log.close()
            self._processes[name] = process
            status = await process.wait()
            logger.warning("%s ended (%d); its log is %s", name, status, self.directory / f"{name}.log")
            pause_s = (
                RESTART_PAUSE_S if loop.time() - began > RESTART_PAUSE_S_MAX else min(pause_s * 2, RESTART_PAUSE_S_MAX)
            )
            await asyncio.sleep(pause_s)

    async def _stop(self, name: str) -> None:
        process = self._processes.get(name)
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %d s and is killed", name, STOP_S)
            process.kill()
            await process.wait()

    async def _end_orphan(self, shard: str) -> None:
        """End a shard that goes on: its coordinator was just away, and so could not end it."""
        process = await asyncio.to_thread(find, self._pid_file(shard))
        if process is None:
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(process.pidfd, ended.set)
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                send(process, number)
                try:
                    async with asyncio.timeout(STOP_S):
                        await ended.wait()
                    return
                except TimeoutError:
                    logger.warning("%s did not end within %d s", shard, STOP_S)
        finally:
            loop.remove_reader(process.pidfd)
            os.close(process.pidfd)

    async def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until every router and every shard is ready. Raises UnavailableError, saying what is not."""
        urls = [*self.router_urls, *(f"http://127.0.0.1:{http}" for http, _ in self.ports.shards)]
        waiting = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            try:
                async with asyncio.timeout(timeout_s):
                    for url in urls:
                        while (waiting := await _why_not_ready(session, url)) != "":
                            await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise UnavailableError(
                    f"not ready after {timeout_s:.0f} s: {waiting}; see {self.directory}/*.log"
                ) from None


async def _why_not_ready(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/readyz") as response:
            return "" if response.ok else f"{url}: {(await response.text()).strip()}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{url}: {error}"


@contextlib.asynccontextmanager
async def running(cluster: LocalCluster, *, ready_s: float = READY_S) -> AsyncIterator[LocalCluster]:
    """A cluster that is ready, for as long as the block lasts."""
    keeping = asyncio.create_task(cluster.run())
    ready = asyncio.create_task(cluster.wait_ready(ready_s))
    try:
        await asyncio.wait({keeping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            yield cluster
    finally:
        ready.cancel()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sarp up` takes."""
    parser.add_argument("--shards", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--routers", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path(".sarp"), help="where all of it is kept (default: %(default)s)"
    )
    parser.add_argument("--any-ports", action="store_true", help="take ports that are free instead of the usual ones")
    parser.add_argument("--credentials", type=Path, metavar="FILE", help="who may do what (default: anybody here)")
    parser.add_argument("--splits", type=Path, metavar="FILE", help="split table of the first slot map (JSON)")
    parser.add_argument("--redis", metavar="URL", help="keep the coordinator's records in Redis")
    parser.add_argument("--redis-password", type=Path, metavar="FILE", help="the password, for its owner to read only")
    parser.add_argument(
        "--index",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the shards' indexes (docs/configuration.md); may be given several times",
    )
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(arguments: argparse.Namespace) -> int:
    """Run a cluster until it is told to end."""
    for option, value, highest in (("shards", arguments.shards, 64), ("routers", arguments.routers, ROUTERS_MAX)):
        if not 1 <= value <= highest:
            raise BadRequestError(f"--{option}: {value} is not in 1..{highest}", field=option)
    if arguments.redis is not None:
        parse_redis_url(arguments.redis)  # told here, not in a log
    read_index_config(arguments.index)  # said now, not in a log
    ports = (Ports.free if arguments.any_ports else Ports.usual)(arguments.shards, arguments.routers)
    cluster = LocalCluster(
        directory=arguments.directory,
        ports=ports,
        credentials=arguments.credentials,
        splits=arguments.splits,
        redis=arguments.redis,
        redis_password=arguments.redis_password,
        index=arguments.index,
        verbose=arguments.verbose,
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    return asyncio.run(_foreground(cluster))


async def _foreground(cluster: LocalCluster) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    keeping = asyncio.create_task(cluster.run())
    ready = asyncio.create_task(cluster.wait_ready())
    status = 0
    try:
        await asyncio.wait({stopping, keeping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            _say(cluster)
            await asyncio.wait({stopping, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
    except SarpError as error:
        print(f"sarp up: error: {error}", file=sys.stderr)
        status = 2
    finally:
        print("ending: routers, then the coordinator and its shards", flush=True)
        for task in (stopping, ready, keeping):
            task.cancel()
        await asyncio.gather(stopping, ready, keeping, return_exceptions=True)
    return status


def _say(cluster: LocalCluster) -> None:
    print(f"A cluster of {len(cluster.ports.shards)} shards is ready.")
    for url, stream in zip(cluster.router_urls, cluster.router_streams, strict=True):
        print(f"  router       {url}   {stream}")
    print(f"  coordinator  {cluster.coordinator_url}   (status page)")
    print(f"  directory    {cluster.directory}   (logs: *.log, coordinator/shards/*.log)")
    print("Ctrl-C ends it; nothing acknowledged is lost.", flush=True)
