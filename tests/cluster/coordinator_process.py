"""A coordinator's process and the shards it supervises, for tests that kill them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

WAIT_S: Final = 40.0
LOOK_S: Final = 0.02


def until(condition: Callable[[], Any], what: str) -> Any:  # what the condition is
    """What the condition returns, once that is true."""
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {WAIT_S:g} s for {what}"
        time.sleep(LOOK_S)
    return found


def ask(address: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """(status, reply) of an HTTP request; status 0: nobody is there."""
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=10)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        raw = response.read()
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.status, json.loads(raw) if is_json else raw.decode()
    except (OSError, HTTPException):
        return 0, None
    finally:
        connection.close()


class CoordinatorProcess:
    """One coordinator at a time, over one directory."""

    def __init__(
        self,
        directory: Path,
        shards: int,
        *,
        name: str = "coordinator",
        stream_port: int = 0,
        options: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.shards = shards
        self.name = name
        self.options = tuple(options)
        self.secret = directory / "secret"
        if not self.secret.exists():
            self.secret.write_bytes(os.urandom(32))
            self.secret.chmod(0o600)
        self.stream_port = stream_port
        self.http = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "coordinator"),
            *("--name", self.name, "--directory", str(self.directory / self.name)),
            *("--cluster-secret", str(self.secret)),
            *("--http-port", "0", "--stream-port", str(self.stream_port)),
            *("--shards", str(self.shards), "--shard-http-port", "0", "--shard-stream-port", "0"),
            *self.options,
        ]

    def start(self) -> None:
        """Start it, and wait until it listens. Its stream stays at the address that shards know."""
        self._starts += 1
        log = self.directory / f"{self.name}-{self._starts}.log"
        with log.open("wb") as file:
            self.process = subprocess.Popen(self.command(), stderr=file)  # noqa: S603
        found = until(lambda: re.search(r"HTTP on (\S+), stream on \S+:(\d+)", log.read_text()), "the coordinator")
        self.http, self.stream_port = found[1], int(found[2])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; the shards go on."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(WAIT_S)
        self.process = None
        return status

    # --- looking ------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:  # whatever is there
        status, reply = ask(self.http, "GET", path)
        return reply if status == 200 else None

    def post(self, path: str) -> tuple[int, Any]:
        return ask(self.http, "POST", path)

    def shard(self, name: str = "shard-0") -> dict[str, Any]:
        """A shard's status."""
        cluster = self.get("/v1/cluster") or {"shards": []}
        return next((one for one in cluster["shards"] if one["shard"] == name), {})

    def wait_state(self, *states: str, name: str = "shard-0", not_incarnation: str = "") -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            status = self.shard(name)
            return status if status.get("state") in states and status["incarnation"] != not_incarnation else None

        found: dict[str, Any] = until(reached, f"{name} to be {' or '.join(states)}")
        return found

    def wait_serving(self) -> None:
        """Until there is a published map and all serve."""
        until(lambda: self.get("/readyz"), "a published map")
        for number in range(self.shards):
            self.wait_state("serving", name=f"shard-{number}")

    def pid(self, name: str = "shard-0") -> int:
        """Of a shard's process, as its pid file says."""
        found: int = json.loads((self.directory / self.name / "shards" / f"{name}.pid").read_text())["pid"]
        return found

    def kinds(self, node: str = "shard-0") -> list[str]:
        """Kinds of a node's events, oldest first."""
        events = (self.get("/v1/events?limit=4096") or {"events": []})["events"]
        return [event["kind"] for event in events if event["node"] == node]


def alive(pid: int) -> bool:
    """Is it there, and not only waiting to be waited for?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def cluster(directory: Path, shards: int = 3) -> Iterator[CoordinatorProcess]:
    """A running cluster, of which nothing is left afterwards."""
    one = CoordinatorProcess(directory, shards)
    with ending(one):
        one.start()
        one.wait_serving()
        yield one


@contextmanager
def ending(one: CoordinatorProcess) -> Iterator[None]:
    """Nothing of it is left afterwards."""
    try:
        yield
    finally:
        if one.process is not None:
            one.end(signal.SIGKILL)
        for number in range(one.shards):
            try:
                pid = one.pid(f"shard-{number}")
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            except (OSError, ValueError):
                pass  # it never was there, or has just ended
