"""The supervisor, over real processes: it starts, adopts, restarts and ends them, and never anybody else's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from coordinator import child_process
from coordinator.child_process import find
from coordinator.supervisor import PAUSE_S_MAX, PAUSE_S_MIN, Supervisor
from sarp_cluster.storage.record_file import RecordFile

SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
while True:
    time.sleep(60)
"""
STUBBORN = SLEEPER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
WAIT_S = 30


def command(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


class Exits:
    """Who ended, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self._news = asyncio.Event()

    def __call__(self, name: str, pid: int) -> None:
        self.told.append((name, pid))
        self._news.set()

    async def wait(self, count: int) -> list[tuple[str, int]]:
        async with asyncio.timeout(WAIT_S):
            while len(self.told) < count:
                self._news.clear()
                await self._news.wait()
        return self.told


@asynccontextmanager
async def supervised(
    directory: Path, program: str = SLEEPER, *, keep: bool = False
) -> AsyncIterator[tuple[Supervisor, Exits]]:
    """A supervisor of one shard, whose process is ended with it unless it is to be kept."""
    exits = Exits()
    one = Supervisor(directory, {"s0": command(program)}, exits)
    try:
        yield one, exits
    finally:
        if not keep and one.pid("s0") is not None:
            one.kill("s0")
            async with asyncio.timeout(WAIT_S):
                await one._children["s0"].ended.wait()
        await one.close()


async def running(one: Supervisor) -> int:
    """The pid, once it runs."""
    async with asyncio.timeout(WAIT_S):
        while (pid := one.pid("s0")) is None:
            await asyncio.sleep(0)
    return pid


async def says(directory: Path, times: int = 1) -> None:
    """Until the program has said so often that it is up."""
    async with asyncio.timeout(WAIT_S):
        while await asyncio.to_thread(lambda: (directory / "s0.log").read_text().count("up")) < times:
            await asyncio.sleep(0)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_shard_is_started_in_a_session_of_its_own_and_its_output_kept(tmp_path: Path) -> None:
    async with supervised(tmp_path / "run") as (one, _):
        assert await one.adopt() == ["s0"]
        one.start("s0")
        one.start("s0")
        pid = await running(one)
        await says(tmp_path / "run")
        assert os.getsid(pid) == pid != os.getsid(0)
        one.start("s0")
        assert one.pid("s0") == pid


async def test_an_end_is_told_at_once(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (one, exits):
        one.start("s0")
        pid = await running(one)
        os.kill(pid, signal.SIGKILL)
        assert await exits.wait(1) == [("s0", pid)]
        assert one.pid("s0") is None
        assert not alive(pid), "nobody has waited for it"


async def test_a_stopped_process_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (one, exits):
        one.start("s0")
        pid = await running(one)
        os.kill(pid, signal.SIGSTOP)
        one.kill("s0")
        assert await exits.wait(1) == [("s0", pid)]
        one.kill("s0")
        assert await exits.wait(2) == [("s0", pid), ("s0", 0)]  # there is none: it may be started


async def test_processes_outlive_their_coordinator_and_the_next_one_adopts_them(tmp_path: Path) -> None:
    async with supervised(tmp_path, keep=True) as (one, _):
        one.start("s0")
        pid = await running(one)
    assert alive(pid)
    async with supervised(tmp_path) as (one, exits):
        assert await one.adopt() == []
        assert one.pid("s0") == pid
        one.start("s0")
        assert one.pid("s0") == pid
        one.kill("s0")
        assert await exits.wait(1) == [("s0", pid)]


ORPHANER = """
import asyncio, sys
from pathlib import Path
from coordinator.supervisor import Supervisor
async def main():
    one = Supervisor(Path(sys.argv[1]), {"s0": sys.argv[2:]}, lambda *_: None)
    one.start("s0")
    while one.pid("s0") is None:
        await asyncio.sleep(0)
    print(one.pid("s0"))
asyncio.run(main())
"""


async def test_the_end_of_a_process_that_is_not_our_child_is_told(tmp_path: Path) -> None:
    coordinator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORPHANER, str(tmp_path), *command(SLEEPER), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await coordinator.communicate()
    pid = int(said)
    async with supervised(tmp_path) as (one, exits):
        assert await one.adopt() == []
        assert one.pid("s0") == pid
        one.kill("s0")
        assert await exits.wait(1) == [("s0", pid)]


@pytest.mark.parametrize("field", ["start_time", "boot"])
async def test_a_pid_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path, field: str) -> None:
    async with supervised(tmp_path) as (one, _):
        one.start("s0")
        pid = await running(one)
        pid_file = tmp_path / "s0.pid"
        name = json.loads(pid_file.read_text())
        name[field] = "another" if field == "boot" else name[field] - 1
        pid_file.write_text(json.dumps(name))
        other = Supervisor(tmp_path, {"s0": command(SLEEPER)}, lambda *_: None)
        assert await other.adopt() == ["s0"]
        await other.close()
        assert alive(pid)


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"pid": 0, "start_time": 1, "boot": ""}'])
def test_a_pid_file_that_makes_no_sense_names_nobody(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "s0.pid").write_bytes(content)
    assert find(tmp_path / "s0.pid") is None


async def test_one_that_ends_again_and_again_is_started_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def no_time(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("coordinator.supervisor.asyncio.sleep", no_time)
    async with supervised(tmp_path, "raise SystemExit(1)") as (one, exits):
        for count in range(1, 10):
            one.start("s0")
            await exits.wait(count)
        assert pauses == [min(PAUSE_S_MIN * 2**n, PAUSE_S_MAX) for n in range(8)]
        one.calm("s0")
        one.start("s0")
        await exits.wait(10)
        assert len(pauses) == 8


async def test_a_program_that_is_not_there_is_told_like_an_end(tmp_path: Path) -> None:
    exits = Exits()
    one = Supervisor(tmp_path, {"s0": ["/nowhere/at/all"]}, exits)
    one.start("s0")
    assert await exits.wait(1) == [("s0", 0)]
    await one.close()


async def test_one_that_is_told_to_end_ends(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (one, exits):
        one.start("s0")
        await running(one)
        await says(tmp_path)
        assert await one.stop("s0", WAIT_S)
        assert len(exits.told) == 1
        assert await one.stop("s0", WAIT_S)  # it has none


async def test_one_that_does_not_end_in_time_is_left(tmp_path: Path) -> None:
    async with supervised(tmp_path, STUBBORN) as (one, exits):
        one.start("s0")
        pid = await running(one)
        await says(tmp_path)
        assert not await one.stop("s0", 0.01)
        assert one.pid("s0") == pid
        assert exits.told == []


async def test_one_that_is_held_is_not_started_by_us_or_a_successor(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (one, _):
        await one.adopt()
        await one.hold("s0")
        one.start("s0")
        await asyncio.sleep(0)
        assert one.pid("s0") is None
    async with supervised(tmp_path) as (one, _):
        assert await one.adopt() == ["s0"]
        assert one.held == {"s0"}
        one.start("s0")
        assert one._children["s0"].starting is None
        await one.release("s0")
        one.start("s0")
        await running(one)
    async with supervised(tmp_path) as (one, _):
        await one.adopt()
        assert one.held == frozenset()


async def test_a_log_that_grew_long_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "LOG_BYTES_MAX", 10)
    (tmp_path / "s0.log").write_text("much that was said before")
    async with supervised(tmp_path) as (one, _):
        one.start("s0")
        await running(one)
        await says(tmp_path)
    assert (tmp_path / "s0.log.1").read_text() == "much that was said before"
    assert (tmp_path / "s0.log").read_text() == "up\n"


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    async with supervised(tmp_path) as (one, exits):
        for count in range(1, 4):
            one.calm("s0")
            one.start("s0")
            await running(one)
            one.kill("s0")
            await exits.wait(count)
    assert set(os.listdir("/proc/self/fd")) == before


def test_it_works_on_the_loop_that_services_run_on(tmp_path: Path) -> None:
    async def work() -> None:
        async with supervised(tmp_path) as (one, exits):
            one.start("s0")
            pid = await running(one)
            one.kill("s0")
            assert await exits.wait(1) == [("s0", pid)]

    run: Callable[[Awaitable[None]], None] = uvloop.run  # type: ignore[assignment]
    run(work())


@pytest.mark.parametrize("whose", ["its own", "an earlier process's"])
async def test_a_shard_that_says_it_was_drained_is_held(tmp_path: Path, whose: str) -> None:
    async with supervised(tmp_path) as (supervisor, exits):
        supervisor.start("s0")
        pid = await running(supervisor)
        assert supervisor.idle() == frozenset()
        file = await RecordFile.open(tmp_path / "s0" / "drained")
        await file.write(str(pid if whose == "its own" else pid - 1).encode())
        await file.close()
        os.kill(pid, signal.SIGKILL)
        await exits.wait(1)
        assert supervisor.idle() == {"s0"}
        assert await supervisor.hold_drained("s0") == (whose == "its own")
        assert supervisor.held == ({"s0"} if whose == "its own" else frozenset())
        await supervisor.release("s0")
