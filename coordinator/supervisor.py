"""Starts the shards of this machine, and starts them again when they end (design §7).

They outlive the coordinator: its successor finds them by their pid files and goes on where it ended. In the directory
there are for each shard NAME.pid, NAME.log, and NAME.held if an operator does not want it started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from coordinator.child_process import Process, ProcessName, find, reap, send, spawn
from sarp_cluster.errors import StorageError
from sarp_cluster.storage.file_system import run_to_end
from sarp_cluster.storage.record_file import decode

logger: Final = logging.getLogger(__name__)

PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 5.0
STABLE_S: Final = 10.0
"""A process that ran for so long is started again at once when it ends."""


class _Child:
    """One shard's process, if there is one."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.command = tuple(command)
        self.process: Process | None = None
        self.began = 0.0
        self.ended = asyncio.Event()
        self.ended.set()
        self.pause_s = 0.0
        """Before it is started the next time."""
        self.starting: asyncio.Task[None] | None = None
        self.held = False


class Supervisor:
    """The processes. `exited` is called with name and pid when one has ended, or cannot be started (pid 0)."""

    def __init__(
        self, directory: Path, commands: Mapping[str, Sequence[str]], exited: Callable[[str, int], None]
    ) -> None:
        self._directory = directory
        self._exited = exited
        self._children = {name: _Child(name, command) for name, command in commands.items()}
        self._loop = asyncio.get_running_loop()

    @property
    def names(self) -> frozenset[str]:
        """The shards that are supervised."""
        return frozenset(self._children)

    @property
    def held(self) -> frozenset[str]:
        """Those that an operator does not want started."""
        return frozenset(child.name for child in self._children.values() if child.held)

    def pid(self, name: str) -> int | None:
        """Of a shard's process, if it runs."""
        process = self._children[name].process
        return None if process is None else process.pid

    def idle(self) -> frozenset[str]:
        """Those that have no process, and shall have one."""
        return frozenset(
            child.name
            for child in self._children.values()
            if child.process is None and child.starting is None and not child.held
        )

    async def hold_drained(self, name: str) -> bool:
        """Hold a shard whose last process was drained, by whichever coordinator. False: it was not."""
        if not await run_to_end(lambda: self._drained(name)):
            return False
        await self.hold(name)
        return True

    def _drained(self, name: str) -> bool:
        """Does the shard's directory say that the last process was drained?"""
        said = self._directory / name / "drained"
        try:
            pid = msgspec.json.decode(self._file(name, "pid").read_bytes(), type=ProcessName).pid
            return decode(said.read_bytes(), said) == str(pid).encode()
        except (OSError, StorageError, msgspec.DecodeError):
            return False

    def _file(self, name: str, suffix: str) -> Path:
        return self._directory / f"{name}.{suffix}"

    # --- finding and starting -----------------------------------------------------------------------------------------

    async def adopt(self) -> list[str]:
        """Take over the processes that run; returns the names of shards that have none."""

        def look() -> dict[str, tuple[Process | None, bool]]:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return {name: (find(self._file(name, "pid")), self._file(name, "held").exists()) for name in self._children}

        missing = []
        for name, (process, held) in (await run_to_end(look, _close_all)).items():
            child = self._children[name]
            child.held = held
            if process is None:
                missing.append(name)
                await self.hold_drained(name)
            else:
                logger.info("shard %s: process %d runs already", name, process.pid)
                self._watch(child, process)
        return missing

    def start(self, name: str) -> None:
        """Start a shard, after a pause when it has ended often lately; not one that runs, is being started or held."""
        child = self._children[name]
        if child.process is None and child.starting is None and not child.held:
            child.starting = self._loop.create_task(self._start(child))

    def calm(self, name: str) -> None:
        """Forget how often it has ended: an operator wants it started."""
        child = self._children[name]
        child.pause_s = 0.0
        if child.starting is not None:
            child.starting.cancel()
            child.starting = None

    async def _start(self, child: _Child) -> None:
        pause_s, child.pause_s = child.pause_s, min(max(child.pause_s * 2, PAUSE_S_MIN), PAUSE_S_MAX)
        try:
            await asyncio.sleep(pause_s)
            log, pid_file = self._file(child.name, "log"), self._file(child.name, "pid")
            process = await run_to_end(lambda: spawn(child.command, log, pid_file), _close)
        except OSError as error:
            logger.error("shard %s: cannot be started: %s", child.name, error)
            child.starting = None
            self._exited(child.name, 0)
            return
        child.starting = None
        self._watch(child, process)

    def _watch(self, child: _Child, process: Process) -> None:
        child.process, child.began = process, self._loop.time()
        child.ended.clear()
        self._loop.add_reader(process.pidfd, self._has_ended, child)

    def _has_ended(self, child: _Child) -> None:
        process = child.process
        if process is None:
            return
        self._forget(child)
        status = reap(process)
        logger.info(
            "shard %s: process %d ended (%s)", child.name, process.pid, "status unknown" if status is None else status
        )
        if self._loop.time() - child.began >= STABLE_S:
            child.pause_s = 0.0
        self._exited(child.name, process.pid)

    def _forget(self, child: _Child) -> None:
        if child.process is not None:
            self._loop.remove_reader(child.process.pidfd)
            os.close(child.process.pidfd)
            child.process = None
            child.ended.set()

    # --- ending -------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a shard's process at once, stopped or not. Without one, `exited` is called: it may be started."""
        process = self._children[name].process
        if process is None:
            self._loop.call_soon(self._exited, name, 0)
        else:
            send(process, signal.SIGKILL)

    async def stop(self, name: str, timeout_s: float) -> bool:
        """Tell a shard's process to end in order, and wait. False: it had not after so long."""
        child = self._children[name]
        if child.starting is not None:
            child.starting.cancel()
            await asyncio.gather(child.starting, return_exceptions=True)
            child.starting = None
        if child.process is not None:
            send(child.process, signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await child.ended.wait()
        except TimeoutError:
            return False
        return True

    async def hold(self, name: str) -> None:
        """Do not start it again, nor shall a successor."""
        self._children[name].held = True
        await run_to_end(self._file(name, "held").touch)

    async def release(self, name: str) -> None:
        """It may be started again."""
        await run_to_end(lambda: self._file(name, "held").unlink(missing_ok=True))
        self._children[name].held = False

    async def close(self) -> None:
        """Let go of the processes. They go on."""
        tasks = [child.starting for child in self._children.values() if child.starting is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for child in self._children.values():
            child.starting = None
            self._forget(child)


def _close(process: Process) -> None:
    os.close(process.pidfd)


def _close_all(found: dict[str, tuple[Process | None, bool]]) -> None:
    for process, _ in found.values():
        if process is not None:
            _close(process)
