"""Compiles the C++ baselines for this CPU at first use, into the build directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

_BUILD = Path(__file__).parents[2] / "build" / "baselines"
_COMMAND = ("g++", "-std=c++17", "-O3", "-march=native", "-Wall", "-Wextra")


def compiled(source: Path, *options: str) -> Path:
    """The program or library made of a source, compiled if it is not there yet."""
    command = [*_COMMAND, *options]
    digest = hashlib.blake2b(" ".join(command).encode() + source.read_bytes(), digest_size=8).hexdigest()
    made = _BUILD / f"{source.stem}-{digest}"
    if not made.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as directory:  # so that nobody loads half a file
            fresh = Path(directory) / made.name
            subprocess.run([*command, str(source), "-o", str(fresh)], check=True)
            os.replace(fresh, made)
    return made
