"""Coordinators over one Redis, as real processes: one leads, another follows when it dies or stands still, and whatever
becomes of Redis, epochs and numbers never go back, nothing acknowledged is lost, and all heals by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.coordinator_process import CoordinatorProcess, alive, ask, ending, until
from tests.cluster.redis_server import PASSWORD, RedisServer, free_port, redis_server

FOLLOWED_S = 20.0
UP = """
import argparse, sys
from sarp_cluster import up
parser = argparse.ArgumentParser()
up.add_arguments(parser)
sys.exit(up.run(parser.parse_args()))
"""


class Coordinators:
    """Two over one Redis; the first one starts the shards of this machine."""

    def __init__(self, directory: Path, redis: RedisServer, shards: int, stack: ExitStack) -> None:
        ports = {"first": free_port(), "second": free_port()}
        self.redis = redis
        self.processes = []
        for name, other, own in (("first", "second", shards), ("second", "first", 0)):
            options = ["--redis", redis.url, "--coordinator", f"127.0.0.1:{ports[other]}", "--expect", str(shards)]
            process = CoordinatorProcess(directory, own, name=name, stream_port=ports[name], options=options)
            self.processes.append(process)
            stack.enter_context(ending(process))
        self.first, self.second = self.processes
        self.shards = [f"shard-{number}" for number in range(shards)]
        self.http: dict[str, str] = {}
        """Where each shard's HTTP is, as it was last seen."""

    def leader(self) -> CoordinatorProcess | None:
        """The one that leads and is ready."""
        ready = [one for one in self.processes if one.process is not None and one.get("/readyz")]
        assert len(ready) <= 1
        return ready[0] if ready else None

    def wait_serving(self, one: CoordinatorProcess) -> None:
        """Until this one leads and every shard serves."""
        until(lambda: one.get("/readyz"), f"{one.name} to lead")
        for name in self.shards:
            self.http[name] = one.wait_state("serving", name=name)["http"]

    def pids(self) -> list[int]:
        return [self.first.pid(name) for name in self.shards]

    def register(self, worker: str) -> tuple[int, Any]:
        return ask(self.http[self.shards[0]], "POST", "/v1/workers/register", {"worker": worker})


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def both(tmp_path: Path, redis: RedisServer) -> Iterator[Coordinators]:
    with ExitStack() as stack:
        found = Coordinators(tmp_path, redis, 2, stack)
        found.first.start()
        found.wait_serving(found.first)
        found.second.start()
        yield found


def slots(one: CoordinatorProcess) -> tuple[int, str, int]:
    """Epoch, nonce and number."""
    reply = one.get("/v1/slots")
    return reply["epoch"], reply["nonce"], reply["number"]


def leads(one: CoordinatorProcess) -> bool:
    return "sarp_coordinator_leading 1" in (one.get("/metrics") or "").splitlines()


def running(command: str) -> int:
    """Processes of this cluster's shards."""
    return sum(
        command in line
        for pid in os.listdir("/proc")
        if pid.isdecimal() and alive(int(pid))
        for line in [_command_line(pid)]
    )


def _command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.timeout(180)
def test_a_killed_leader_is_followed_and_its_shards_are_started_by_nobody_else(both: Coordinators) -> None:
    first, second = both.first, both.second
    assert (leads(first), leads(second)) == (True, False)
    assert both.register("before")[0] == 200
    before, pids = slots(first), both.pids()
    began = time.monotonic()
    first.end(signal.SIGKILL)
    both.wait_serving(second)
    assert time.monotonic() - began < FOLLOWED_S
    assert slots(second) == before
    assert both.pids() == pids
    until(lambda: second.shard("shard-0")["lease_left_s"] > 50, "the leases to go on")
    assert both.register("behind")[0] == 200
    assert second.get("/v1/cluster")["number"] == before[2] + 1

    first.start()  # it follows, and takes care of its processes all the same
    until(lambda: first.get("/metrics"), "the first to be there")
    assert not leads(first)
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: both.pids()[0] != pids[0], "shard-0 to be started again")
    second.wait_state("serving")
    assert (leads(first), leads(second)) == (False, True)
    assert running(f"{first.directory}/first/shards/") == len(both.shards)
    assert second.post("/v1/shards/shard-1/drain")[0] == 200  # by the leader: the other one leaves it in peace
    second.wait_state("down", name="shard-1")
    until((first.directory / "first" / "shards" / "shard-1.held").exists, "it to be held")
    assert not alive(both.pids()[1])


@pytest.mark.timeout(180)
def test_a_leader_that_stood_still_does_nothing_when_it_goes_on(both: Coordinators) -> None:
    first, second = both.first, both.second
    before, pids = slots(first), both.pids()
    assert first.process is not None
    began = time.monotonic()
    first.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: second.get("/readyz"), "the second to lead")
        both.wait_serving(second)
        assert time.monotonic() - began < FOLLOWED_S
        assert both.register("meanwhile")[0] == 200
    finally:
        first.process.send_signal(signal.SIGCONT)
    until(lambda: first.get("/metrics"), "the first to go on")
    assert first.get("/readyz") is None
    assert not leads(first)
    assert first.get("/v1/slots") is None
    assert both.register("behind")[0] == 200
    assert slots(second) == (*before[:2], before[2] + 2)
    assert both.pids() == pids
    assert leads(second)


class Alone:
    """One coordinator, one shard, and what a caller does."""

    def __init__(self, directory: Path, redis: RedisServer, stack: ExitStack) -> None:
        self.redis = redis
        self.one = CoordinatorProcess(directory, 1, stream_port=free_port(), options=["--redis", redis.url])
        stack.enter_context(ending(self.one))
        self.one.start()
        self.one.wait_serving()
        self.http = self.one.shard()["http"]
        status, reply = ask(self.http, "POST", "/v1/namespaces", {"model": "m", "hash_profile": "opaque"})
        assert status == 200, reply
        self.namespace = reply["namespace"]
        assert self.register("w")[0] == 200
        self.inserted: list[int] = []

    def register(self, worker: str) -> tuple[int, Any]:
        return ask(self.http, "POST", "/v1/workers/register", {"worker": worker})

    def insert(self) -> None:
        block = 1_000 + len(self.inserted)
        body = {"namespace": self.namespace, "block_ids": [block], "worker": "w"}
        status, reply = ask(self.http, "POST", "/v1/insert", body)
        assert status == 200, reply
        self.inserted.append(block)

    def match_all(self) -> None:
        for block in self.inserted:
            body = {"namespace": self.namespace, "block_ids": [block], "deadline_ms": 5_000}
            status, reply = ask(self.http, "POST", "/v1/match", body)
            assert status == 200, reply
            assert (reply["matched_blocks"], reply["complete"]) == (1, True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("comes_back", ["empty", "as it was before", "with a foreign map", "after it stood still"])
def test_redis_is_killed_and_lies_when_it_is_back(tmp_path: Path, redis: RedisServer, comes_back: str) -> None:
    with ExitStack() as stack:
        alone = Alone(tmp_path, redis, stack)
        one = alone.one
        alone.insert()
        redis.back_up("before")
        for worker in ("x", "y"):
            assert alone.register(worker)[0] == 200
        if comes_back == "with a foreign map":
            [key] = redis.keys("sarp:*:slot_map")
            redis.command("SET", key, "http://elsewhere/")
        before, pid, lease_at = slots(one), one.pid(), time.monotonic()
        if comes_back == "after it stood still":
            redis.signal(signal.SIGSTOP)
        else:
            redis.kill()
        alone.insert()
        until(lambda: not leads(one), "it to lead no more")
        assert time.monotonic() - lease_at < 10
        status, reply = alone.register("nobody numbers it")
        assert (status, reply["error"]["outcome"]) == (503, "not_applied")
        alone.insert()  # the shard's lease lasts
        alone.match_all()
        if comes_back == "empty":
            redis.forget()
        elif comes_back == "as it was before":
            redis.put_back("before")
        if comes_back == "after it stood still":
            redis.signal(signal.SIGCONT)
        else:
            redis.start()
        until(lambda: one.get("/readyz"), "it to lead again")
        until(lambda: slots(one) == before, "all that the shard knows to be taken over")
        assert one.pid() == pid
        status, reply = alone.register("behind")
        assert status == 200, reply
        assert one.get("/v1/cluster")["number"] == before[2] + 1
        alone.insert()
        alone.match_all()
        assert one.shard()["lease_left_s"] > 50
        one.end(signal.SIGKILL)  # and the next one finds all of it
        one.start()
        one.wait_serving()
        until(lambda: slots(one) == (*before[:2], before[2] + 1), "all of it to be there")
        assert ("records_rejected" in one.kinds("coordinator")) == (comes_back == "with a foreign map")
        assert alone.register("last")[0] == 200
        alone.match_all()


@pytest.mark.timeout(120)
def test_sarp_up_keeps_its_records_in_redis(tmp_path: Path, redis: RedisServer) -> None:
    password = tmp_path / "password"
    password.write_text(f"{PASSWORD}\n")
    password.chmod(0o600)
    command = [
        *(sys.executable, "-c", UP, "--shards", "1", "--any-ports"),
        *("--directory", str(tmp_path / "up"), "--redis", f"redis://127.0.0.1:{redis.port}"),
        *("--redis-password", str(password)),
    ]
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603
    try:
        until(lambda: b"is ready" in (tmp_path / "up.log").read_bytes(), "the cluster to be ready")
        names = {key.rpartition(":")[2] for key in redis.keys("*")}
        assert names == {"leader", "head", "slot_map", "shards"}
        assert all(key.startswith("sarp:{") for key in redis.keys("*"))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    assert not any(key.endswith(":leader") for key in redis.keys("*"))  # given back
    for path in (tmp_path / "up").glob("*.log"):
        assert PASSWORD not in path.read_text()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--redis", "http://h"], "--redis: 'http' is none of"),
        (["--redis-password", "/nowhere"], "--redis-password: there is no --redis"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str], why: str) -> None:
    one = CoordinatorProcess(tmp_path, 0, options=options)
    done = subprocess.run(one.command(), capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    assert done.returncode == 2
    assert why in done.stderr
