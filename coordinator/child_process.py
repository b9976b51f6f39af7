"""A process that outlives us, and that whoever comes after us finds again.

A process is named by its pid, the time it started and the machine's boot: a pid alone may be somebody else's by now. A
pidfd, once opened, stays this process's: it tells of its end, child of ours or not, and signals nobody else. The
functions wait for the disk: call them in a helper thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

LOG_BYTES_MAX: Final = 16 * 1024 * 1024
"""A log file that is longer when a process starts is put aside, in place of the one before it."""
_START_TIME: Final = 22 - 3
"""Place of `starttime` in /proc/PID/stat, counted behind the name, which is the second field."""


class ProcessName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pid file has."""

    pid: int
    start_time: int
    """Clock ticks from the boot to the process's start."""
    boot: str


class Process(NamedTuple):
    """A process that is there, or has just ended."""

    pid: int
    pidfd: int


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> int | None:
    """None: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME])


def spawn(command: Sequence[str], log: Path, pid_file: Path) -> Process:
    """Start a program in a session of its own, so that no signal to ours reaches it; its output goes to a file."""
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_name(f"{log.name}.1"))
    pid = os.posix_spawn(
        command[0],
        tuple(command),
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
    )
    process = Process(pid, os.pidfd_open(pid))
    # Nobody has waited for it, so the pid is still its own, even if it has ended.
    name = ProcessName(pid, _start_time(pid) or 0, _boot())
    temporary = pid_file.with_name(f"{pid_file.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(name))
    temporary.replace(pid_file)
    return process


def find(pid_file: Path) -> Process | None:
    """The process that a pid file names, if it is still there."""
    try:
        name = msgspec.json.decode(pid_file.read_bytes(), type=ProcessName)
        if name.boot != _boot():
            return None
        pidfd = os.pidfd_open(name.pid)
    except (FileNotFoundError, ProcessLookupError, msgspec.DecodeError):
        return None
    # Looked at behind the opening: it has the pid now and began earlier, so it is what was opened.
    if _start_time(name.pid) != name.start_time:
        os.close(pidfd)
        return None
    return Process(name.pid, pidfd)


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal. False: it has ended."""
    try:
        signal.pidfd_send_signal(process.pidfd, number)
    except ProcessLookupError:
        return False
    return True


def reap(process: Process) -> int | None:
    """Exit status of a process that has ended, -N for signal N; None: it is not our child, nobody tells us."""
    try:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if pid else None
