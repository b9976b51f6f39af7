"""SIGKILL at the Nth call of every kind that touches the store: while it is worked on, and while it is recovered."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import capabilities
from tests.crash.check import check
from tests.crash.programs import command, count_calls, killing, run

WORKLOAD = ("--operations", 20, "--tasks", 3, "--seed", 7)
SAMPLE = (
    ("openat", 1),
    ("openat", 2),
    ("openat", 5),
    ("pwrite64", 1),
    ("pwrite64", 9),
    ("fdatasync", 1),
    ("fdatasync", 2),
    ("fdatasync", 11),
    ("fsync", 1),
    ("fsync", 7),
    ("unlink", 1),
    ("unlink", 2),
)
RECOVERY_SAMPLE = (("openat", 3), ("ftruncate", 1), ("fsync", 1), ("rename", 1), ("rename", 2))


@pytest.fixture(autouse=True)
def needs_strace() -> None:
    capabilities.require(capabilities.strace)


def kill_at(tmp_path: Path, syscall: str, number: int) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    status, errors = run([*killing(store, syscall, number), *command(store, ledger, *WORKLOAD)])
    assert status in (-signal.SIGKILL, 0), errors  # 0: this time there were fewer such calls
    check(store, ledger)


@pytest.mark.parametrize(("syscall", "number"), SAMPLE)
def test_killed_at_a_call(tmp_path: Path, syscall: str, number: int) -> None:
    kill_at(tmp_path, syscall, number)


@pytest.mark.chaos
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("syscall", ["openat", "pwrite64", "fdatasync", "fsync"])
def test_killed_at_every_call(tmp_path: Path, syscall: str) -> None:
    status, calls = count_calls(tmp_path / "s", command(tmp_path / "s", tmp_path / "l", *WORKLOAD), tmp_path / "trace")
    assert status == 0
    assert calls[syscall] > 10
    for number in range(1, calls[syscall] + 1):
        (tmp_path / str(number)).mkdir()
        kill_at(tmp_path / str(number), syscall, number)


# The store's own secret is what everything else depends on: it is made before the rest, and is never half there.


@pytest.mark.parametrize(
    ("syscall", "number"), [("openat", 1), ("openat", 3), ("openat", 4), ("fsync", 1), ("fsync", 2), ("rename", 1)]
)
def test_killed_while_the_secret_is_made(tmp_path: Path, syscall: str, number: int) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    driver = command(store, ledger, *WORKLOAD, "--own-secret")
    status, errors = run([*killing(store, syscall, number), *driver])
    assert status == -signal.SIGKILL, errors
    check(store, ledger, secret=None)


# Recovery itself.


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store, and its ledger, whose tail is torn in a file behind which there are others."""
    capabilities.require(capabilities.strace)
    made = tmp_path_factory.mktemp("torn")
    status, errors = run(command(made / "store", made / "ledger", "--burst"))
    assert status == -signal.SIGKILL, errors
    logs = sorted((made / "store").glob("log-*.sarp"))
    assert len(logs) > 5
    data = bytearray(logs[-3].read_bytes())
    data[len(data) // 2] ^= 1
    logs[-3].write_bytes(data)
    return made


def copy_of(torn: Path, to: Path) -> tuple[Path, Path]:
    shutil.copytree(torn, to)
    return to / "store", to / "ledger"


def kill_recovery(torn: Path, to: Path, syscall: str, number: int) -> bool:
    store, ledger = copy_of(torn, to)
    status, errors = run([*killing(store, syscall, number), *command(store, ledger, "--reopen")])
    assert status in (-signal.SIGKILL, 0), errors
    check(store, ledger)
    return status != 0


def recovery_calls(torn: Path, tmp_path: Path) -> Iterator[tuple[str, int]]:
    store, ledger = copy_of(torn, tmp_path / "counted")
    status, calls = count_calls(store, command(store, ledger, "--reopen"), tmp_path / "trace")
    assert status == 0
    assert calls["ftruncate"] == 1
    assert calls["rename"] == 2
    return ((syscall, number) for syscall, count in calls.items() for number in range(1, count + 1))


@pytest.mark.parametrize(("syscall", "number"), RECOVERY_SAMPLE)
def test_recovery_killed_at_a_call(torn: Path, tmp_path: Path, syscall: str, number: int) -> None:
    assert kill_recovery(torn, tmp_path / "copy", syscall, number)


@pytest.mark.chaos
@pytest.mark.timeout(1_800)
def test_recovery_killed_at_every_call(torn: Path, tmp_path: Path) -> None:
    calls = list(recovery_calls(torn, tmp_path))
    # strace counts for each thread by itself: the last numbers are those of no single thread.
    killed = [kill_recovery(torn, tmp_path / f"{syscall}-{number}", syscall, number) for syscall, number in calls]
    assert sum(killed) > len(calls) // 2


@pytest.mark.chaos
@pytest.mark.timeout(1_800)
def test_torn_at_every_length(torn: Path, tmp_path: Path) -> None:
    """The last file ends anywhere: a write that was under way."""
    last = max((torn / "store").glob("log-*.sarp")).name
    size = (torn / "store" / last).stat().st_size
    for length in range(0, size, 13):
        store, ledger = copy_of(torn, tmp_path / str(length))
        with (store / last).open("r+b") as file:
            file.truncate(length)
        check(store, ledger)
