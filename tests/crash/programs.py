"""Starts the driver, alone or under strace, and ends what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SYSCALLS: Final = ("openat", "pwrite64", "fdatasync", "fsync", "ftruncate", "rename", "unlink")
"""Calls that change what is on the disk, or make it durable."""
SECONDS_MAX: Final = 50


def command(store: Path, ledger: Path, *options: object) -> list[str]:
    """The driver's command line."""
    return [sys.executable, "-m", "tests.crash.driver", str(store), str(ledger), *map(str, options)]


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A running program in a group of its own, which is ended with all it has started."""
    with subprocess.Popen(  # noqa: S603
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a program to its end: exit status (negative: the signal) and what it wrote to stderr."""
    with started(arguments) as process:
        _, errors = process.communicate(timeout=SECONDS_MAX)
        return process.returncode, errors


def files_of(store: Path) -> list[Path]:
    """The store and all that may stand in it, for strace to look at: whether or not it is there yet."""
    return [store, *(store / f"log-{number:05d}.sarp" for number in range(1, 120)), store / "secret.tmp"]


def strace(store: Path, *expressions: str, output: Path | str = "/dev/null") -> list[str]:
    """strace of the calls on a store's files, to be put before a command line."""
    watched = [word for path in files_of(store) for word in ("-P", str(path))]
    return ["strace", "-f", "-qq", "-o", str(output), *watched, *(w for e in expressions for w in ("-e", e))]


def killing(store: Path, syscall: str, number: int) -> list[str]:
    """strace that kills the program as one of its threads enters its `number`-th `syscall` on the store's files."""
    return strace(store, f"trace={syscall}", f"inject={syscall}:signal=KILL:when={number}")


def count_calls(store: Path, arguments: Sequence[str], trace: Path) -> tuple[int, dict[str, int]]:
    """Run a program; its exit status, and how often it made each call on the store's files."""
    status, _ = run([*strace(store, f"trace={','.join(SYSCALLS)}", output=trace), *arguments])
    calls = [line.split(maxsplit=1)[1] for line in trace.read_text().splitlines() if "resumed>" not in line]
    return status, {name: sum(call.startswith(f"{name}(") for call in calls) for name in SYSCALLS}
