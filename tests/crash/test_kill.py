"""SIGKILL at random times under load, again and again over the same store: what was acknowledged is there."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.crash.check import check
from tests.crash.programs import command, started

CYCLES = 3


@pytest.fixture(autouse=True)
def how_to_repeat(request: pytest.FixtureRequest) -> None:
    print(f"again, with the same seed: pytest -m '' '{request.node.nodeid}'")  # noqa: T201


def kill_under_load(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    options = ["--operations", 10**6, *(["--pure"] if rng.random() < 0.5 else [])]
    acknowledged = 0
    for cycle in range(CYCLES):
        with started(command(store, ledger, "--seed", seed * CYCLES + cycle, *options)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
            time.sleep(rng.uniform(0, 0.25))
            process.kill()
            assert process.wait() == -signal.SIGKILL, process.stderr and process.stderr.read()
        if cycle + 1 == CYCLES or rng.random() < 0.5:  # or the next driver recovers it
            now = check(store, ledger)
            assert now >= acknowledged
            acknowledged = now
    assert acknowledged or os.path.getsize(ledger) < 10_000


@pytest.mark.parametrize("seed", range(5))
def test_killed(tmp_path: Path, seed: int) -> None:
    kill_under_load(tmp_path, seed)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1_000, 1_100))
def test_killed_many_times(tmp_path: Path, seed: int) -> None:
    kill_under_load(tmp_path, seed)
