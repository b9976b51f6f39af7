"""What this machine lets the fault tests do, found out once.

A test that needs more is skipped with the reason; with SARP_REQUIRE_FAULT_TOOLS=1 it fails instead.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

Probe = Callable[[], str | None]
"""Why something cannot be done; None: it can."""


def require(probe: Probe) -> None:
    """Skip the test, or fail it where the tools are required, unless `probe` finds nothing missing."""
    reason = probe()
    if reason is None:
        return
    if os.environ.get("SARP_REQUIRE_FAULT_TOOLS") == "1":
        pytest.fail(f"SARP_REQUIRE_FAULT_TOOLS is set: {reason}", pytrace=False)
    pytest.skip(reason)


def _run(*command: str | Path) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # of the tests' own
    return None if done.returncode == 0 else f"{command[0]}: {(done.stderr or done.stdout).strip()[-200:]}"


@functools.cache
def strace() -> str | None:
    """Can a system call be made to fail?"""
    if shutil.which("strace") is None:
        return "strace is not installed"
    program = "import os, sys\ntry: os.fdatasync(1)\nexcept OSError as e: sys.exit(e.errno != 5)\nsys.exit(1)"
    wanted = ("-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO")
    reason = _run("strace", "-f", "-qq", "-o", "/dev/null", *wanted, sys.executable, "-S", "-c", program)
    return reason and f"strace cannot inject faults here ({reason})"


@functools.cache
def tmpfs() -> str | None:
    """Can a small file system in memory be mounted?"""
    with tempfile.TemporaryDirectory() as directory:
        reason = _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory)
        if reason is None:
            reason = _run("umount", directory)
    return reason and f"no tmpfs can be mounted ({reason})"


IMAGE_BYTES: Final = {"ext4": 64 << 20, "xfs": 320 << 20}
"""A file system's image, sparse. xfs is not made smaller."""


@functools.cache
def loop_image(kind: str) -> str | None:
    """Can an image of this file system, "ext4" or "xfs", be made and mounted?"""
    if shutil.which(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} is not installed"
    with tempfile.TemporaryDirectory() as directory:
        image, mounted = Path(directory, "image"), Path(directory, "mounted")
        mounted.mkdir()
        make_image(image, kind)
        reason = _run("mount", "-o", "loop", image, mounted)
        if reason is None:
            reason = _run("umount", mounted)
    return reason and f"no {kind} image can be mounted ({reason})"


def make_image(image: Path, kind: str) -> None:
    """Make an image of a file system."""
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES[kind])
    options = ("-q", "-F") if kind == "ext4" else ("-q", "-f")
    subprocess.run([f"mkfs.{kind}", *options, str(image)], check=True, capture_output=True)  # noqa: S603


@functools.cache
def redis_server() -> str | None:
    """Is there a Redis to start?"""
    return None if shutil.which("redis-server") is not None else "redis-server is not installed"
