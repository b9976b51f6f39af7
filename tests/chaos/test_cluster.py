"""A cluster of real processes under load, of which some are killed and stopped all the time (design §7).

No match fails, nothing acknowledged is lost, nothing is answered that nobody holds, an answer is cut only while its
shard cannot answer, and afterwards as much is found as before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from sarp_cluster.storage.verify import verify
from sarp_cluster.up import LocalCluster, Ports, running
from tests.chaos.nemesis import Blow, Nemesis
from tests.chaos.workload import ROOT, SECRET, SHARDS, sessions, splits

ROUTERS: Final = 2
HEAL_S: Final = 30.0
SHARE_MIN: Final = 0.2
HIT_RATE_KEPT: Final = 0.99


@pytest.fixture(autouse=True)
def how_to_repeat(request: pytest.FixtureRequest) -> None:
    print(f"again, with the same seed: pytest -m '' '{request.node.nodeid}'")  # noqa: T201


def prepared(directory: Path) -> LocalCluster:
    """A cluster with the workload's secret and split table."""
    directory.mkdir()
    (directory / "splits.json").write_text(json.dumps(splits(sessions())))
    cluster = LocalCluster(
        directory=directory,
        ports=Ports.free(len(SHARDS), ROUTERS),
        splits=directory / "splits.json",
        index=["retrieval_max=none"],  # each answer is the longest there is, or something is wrong
        verbose=True,
    )
    cluster.secret_file.write_bytes(SECRET)
    cluster.secret_file.chmod(0o600)
    return cluster


class DriverProcess:
    """The driver; told what to do by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hear(self) -> list[str]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the driver has ended; its log says why"
        heard: list[str] = json.loads(line)
        return heard

    async def tell(self, *words: str) -> None:
        """Tell it, and wait until it has done so."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words).encode() + b"\n")
        assert await self.hear() == list(words)

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"end\n")
        assert await self._process.wait() == 0, "the driver failed; its log says why"


@asynccontextmanager
async def driving(cluster: LocalCluster, directory: Path, seed: int) -> AsyncIterator[DriverProcess]:
    """A driver that is at work."""
    urls = [url for pair in zip(cluster.router_streams, cluster.router_urls, strict=True) for url in pair]
    command = [sys.executable, "-m", "tests.chaos.driver", str(directory / "ledger"), str(seed), *urls]
    with (directory / "driver.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    driver = DriverProcess(process)
    try:
        assert await driver.hear() == ["ready"]
        yield driver
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def checked(directory: Path) -> dict[str, Any]:
    """The report of the checker's process."""
    command = [sys.executable, "-m", "tests.chaos.check", str(directory / "ledger"), str(directory / "faults")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)  # noqa: S603
    report: dict[str, Any] = json.loads(done.stdout or b'{"wrong": {"checker": ["it failed; checker.log says why"]}}')
    (directory / "checker.log").write_bytes(done.stderr)
    (directory / "report.json").write_bytes(done.stdout)
    return report


async def rounds(cluster: LocalCluster, directory: Path, seed: int, *, calm_s: float, rage_s: float) -> None:
    """Calm, faults, calm; all is looked for; all shards are killed at once; all is looked for again."""
    async with running(cluster), driving(cluster, directory, seed) as driver, Nemesis(cluster, seed) as nemesis:
        try:
            await driver.tell("phase", "before")
            await asyncio.sleep(calm_s)
            await driver.tell("probe", "steady-before")
            await driver.tell("phase", "during")
            await nemesis.rage(rage_s)
            await driver.tell("phase", "healing")
            await nemesis.healed(HEAL_S)
            await driver.tell("phase", "after")
            await asyncio.sleep(calm_s)
            await driver.tell("probe", "steady-after")
            await driver.tell("sweep", "swept")
            for shard in SHARDS:
                await nemesis.strike(Blow(0, shard, 0))
            await nemesis.healed(HEAL_S)
            await driver.tell("sweep", "swept-again")
            await driver.end()
        finally:
            (directory / "nemesis.log").write_text("\n".join(nemesis.log))
            nemesis.save(directory / "faults")


def looked_over(cluster: LocalCluster) -> dict[str, list[str]]:
    """What the ended cluster has left that must not be there: damage in its stores, errors in its logs."""
    shards = cluster.directory / "coordinator" / "shards"
    found = {"damaged store": [shard for shard in SHARDS if not verify(shards / shard / "index").clean]}
    found["logged"] = [
        f"{log.name}: {line}"
        for log in sorted(cluster.directory.rglob("*.log"))
        for line in log.read_text().splitlines()
        if " ERROR " in line or line.startswith("Traceback")
    ]
    return {kind: what for kind, what in found.items() if what}


def chaos(directory: Path, seed: int, *, calm_s: float, rage_s: float) -> dict[str, Any]:
    """One run; what the checker says of it."""
    cluster = prepared(directory / "cluster")
    try:
        asyncio.run(rounds(cluster, directory, seed, calm_s=calm_s, rage_s=rage_s))
    finally:
        print(f"ledger, faults and the nodes' logs: {directory}")  # noqa: T201
    report = checked(directory)
    report["wrong"] |= looked_over(cluster)
    return report


def judge(report: dict[str, Any]) -> None:
    """Is all as it must be?"""
    print(json.dumps(report, indent=1))  # noqa: T201
    assert not report["wrong"], report["wrong"]
    assert set(report["traffic"]) == set(SHARDS)
    assert min(report["traffic"].values()) >= SHARE_MIN, report["traffic"]
    phases = report["phases"]
    assert phases["during"]["matches"] > 100
    assert phases["steady-after"]["hit rate"] >= HIT_RATE_KEPT * phases["steady-before"]["hit rate"] > 0
    assert phases["after"]["of what was there"] >= HIT_RATE_KEPT * phases["before"]["of what was there"]
    for name in ("swept", "swept-again"):
        assert phases[name]["matches"] == phases[name]["complete"] == phases[name]["exact"], phases[name]


@pytest.mark.parametrize("seed", range(1))
def test_processes_killed_and_stopped_under_load(tmp_path: Path, seed: int) -> None:
    judge(chaos(tmp_path, seed, calm_s=0.7, rage_s=4.5))


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1_000, 1_003))
def test_processes_killed_and_stopped_for_a_minute(tmp_path: Path, seed: int) -> None:
    judge(chaos(tmp_path, seed, calm_s=5.0, rage_s=60.0))
