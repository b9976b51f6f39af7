"""A real redis-server on a loopback port, and what is done to it: killed, stopped, emptied, put back, cut short."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests import capabilities

START_S: Final = 10.0
PASSWORD: Final = secrets.token_hex(16)


class RedisError(Exception):
    """What Redis said."""


class RedisServer:
    """One server over one directory. It keeps what it is told in an append-only file, as the documentation asks for."""

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        """Start it, and wait until it has read what it kept."""
        command = [
            *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)),
            *("--requirepass", PASSWORD, "--masterauth", PASSWORD, "--save", "", "--appendonly", "yes"),
            *("--appendfsync", "always", "--enable-debug-command", "yes", "--logfile", "log", *options),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
        end = time.monotonic() + START_S
        while True:
            try:
                self.command("PING")
                return
            except (OSError, RedisError):
                assert time.monotonic() < end, (self.directory / "log").read_text()[-2000:]
                assert self.process.poll() is None, (self.directory / "log").read_text()[-2000:]
                time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; what it has synced stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Take away all that it kept, while it does not run."""
        assert self.process is None
        shutil.rmtree(self.directory / "appendonlydir")

    def back_up(self, name: str) -> None:
        """Keep a copy of what it has now."""
        shutil.copytree(self.directory / "appendonlydir", self.directory / name)

    def put_back(self, name: str) -> None:
        """Have what it had when it was copied, while it does not run."""
        self.forget()
        shutil.copytree(self.directory / name, self.directory / "appendonlydir")

    def keys(self, pattern: str) -> list[str]:
        """All that it has by such a name, at most ten."""
        script = "return table.concat(redis.call('KEYS', ARGV[1]), ' ')"
        return self.command("EVAL", script, "0", pattern).decode().split()

    def command(self, *words: str | bytes) -> bytes:
        """One command's answer, as it comes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(_packed("AUTH", PASSWORD) + _packed(*words))
            with connection.makefile("rb") as answers:
                assert answers.readline() == b"+OK\r\n"
                return _answer(answers.readline(), answers.read)


def _packed(*words: str | bytes) -> bytes:
    raw = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw)


def _answer(line: bytes, read: object) -> bytes:
    if line.startswith(b"-"):
        raise RedisError(line.decode())
    if not line.startswith(b"$") or line == b"$-1\r\n":
        return line[1:-2]
    assert callable(read)
    found: bytes = read(int(line[1:]))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """A server that runs, of which nothing is left afterwards."""
    capabilities.require(capabilities.redis_server)
    server = RedisServer(directory / "redis")
    try:
        server.start()
        yield server
    finally:
        if server.process is not None:
            os.kill(server.process.pid, signal.SIGCONT)
        server.kill()
