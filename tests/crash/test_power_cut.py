"""Power cuts on a real file system: whatever was not synced is gone, and what was acknowledged is there."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import capabilities
from tests.crash.check import check
from tests.crash.programs import command, run, started

FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
"""The journal is not written out: what the file system only has in memory is lost."""


def call(*arguments: object) -> None:
    subprocess.run([*map(str, arguments)], check=True, capture_output=True)  # noqa: S603


class Disk:
    """An image of a file system, mounted, whose power can be cut."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._image, self.path = directory / "image", directory / "disk"
        self._kind = kind
        self.path.mkdir()
        capabilities.make_image(self._image, kind)
        self.mounted = False

    def mount(self, commit: int = 5) -> None:
        """Mount it; the journal of ext4 is committed each `commit` seconds."""
        options = f"loop,commit={commit}" if self._kind == "ext4" else "loop"
        call("mount", "-o", options, self._image, self.path)
        self.mounted = True

    def cut_power(self) -> None:
        """From here on nothing reaches the image."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Unmount it, if it is mounted."""
        if self.mounted:
            call("umount", self.path)
            self.mounted = False


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    kind = request.param
    capabilities.require(lambda: capabilities.loop_image(kind))
    disk = Disk(tmp_path, kind)
    try:
        yield disk
    finally:
        disk.unmount()


def cut_under_load(disk: Disk, ledger: Path, seed: int) -> None:
    """The program outlives the power a little, as one does whose disk is gone, and has to see that for itself."""
    rng = random.Random(seed)
    store = disk.path / "store"
    disk.mount(commit=rng.choice((1, 5, 1_000)))
    with started(command(store, ledger, "--seed", seed, "--operations", 10**6)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
        time.sleep(rng.uniform(0, 0.5))
        if rng.random() < 0.5:
            process.kill()
        disk.cut_power()
        assert process.wait(timeout=10) != 0
    disk.unmount()
    disk.mount()
    check(store, ledger)
    disk.unmount()


def test_power_cut_under_load(disk: Disk, tmp_path: Path) -> None:
    cut_under_load(disk, tmp_path / "ledger", seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_power_cuts_under_load(disk: Disk, tmp_path: Path, seed: int) -> None:
    for cycle in range(10):
        cut_under_load(disk, tmp_path / "ledger", seed * 1_000 + cycle)


def test_power_cut_after_a_kill(disk: Disk, tmp_path: Path) -> None:
    """Recovered from the page cache after a kill, worked with, and then the power fails."""
    store, ledger = disk.path / "store", tmp_path / "ledger"
    disk.mount(commit=1_000)
    status, errors = run(command(store, ledger, "--burst"))
    assert status == -signal.SIGKILL, errors
    status, errors = run(command(store, ledger, "--operations", 10))
    assert status == 0, errors
    disk.cut_power()
    disk.unmount()
    disk.mount()
    check(store, ledger)
