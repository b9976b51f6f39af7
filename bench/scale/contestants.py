"""Who comes back from what: our index and its baselines, each with what it saves and how it is started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.baselines.compiler import compiled
from bench.baselines.redis_rdb import KINDS, Redis, Words, installed
from bench.bulk_load import write_store
from bench.scale.snapshots import Write, save, write_blocks, write_directory, write_query, write_radix
from bench.scale.template import Template, mask_of
from sarp_cluster.storage.store_directory import LOG_NAME

PROGRAM: Final = Path(__file__).parents[1] / "baselines" / "recovery.cpp"
OURS: Final = "SARP"
DROPS_MAX: Final = 20
DROP_PAUSE_S: Final = 0.05
Measured = dict[str, Any]
"""`open_s`, `process_s`, `resident_bytes`: one start."""


class Contestant(ABC):
    """One kind of index. `prepare` saves it once, `start` brings it back as often as one likes."""

    def __init__(self, name: str, blocks_max: float) -> None:
        self.name = name
        self.blocks_max = blocks_max
        """More would take too much memory, or too many minutes."""

    def missing(self) -> str | None:
        """Why it cannot take part here, or None."""
        return None

    def snapshot_bytes(self, directory: Path) -> int:
        """Of what it saved, that from which it comes back; the rest it reads when it is asked for."""
        return files_bytes(directory)

    @abstractmethod
    def prepare(self, directory: Path, template: Template, replicas: int) -> None:
        """Save an index of so many replicas in an empty directory."""

    @abstractmethod
    def start(self, directory: Path, template: Template, replicas: int) -> Measured:
        """Start it again in a process of its own, until its first correct answer."""


class Ours(Contestant):
    """Our index, killed with SIGKILL behind a snapshot and 32 MiB of log, and after each start again."""

    def snapshot_bytes(self, directory: Path) -> int:
        return sum(path.stat().st_size for path in saved_files(directory) if not LOG_NAME.fullmatch(path.name))

    def prepare(self, directory: Path, template: Template, replicas: int) -> None:
        write_store(directory / "store", template, template.blocks_of(replicas))
        dirty = [sys.executable, "-m", "bench.scale.dirty", str(directory / "store"), *self._namespace(template)]
        killed = subprocess.run(dirty, check=False)
        if killed.returncode != -signal.SIGKILL:
            raise SystemExit(f"{' '.join(dirty)} ended with {killed.returncode}")

    def start(self, directory: Path, template: Template, replicas: int) -> Measured:
        query = template.query(len(template.paths) // 2, replicas - 1)
        (directory / "query").write_bytes(query)
        store = [str(directory / "store"), str(directory / "query")]
        return run([sys.executable, "-m", "bench.scale.reopen", *store, *self._namespace(template)])

    def _namespace(self, template: Template) -> list[str]:
        return [template.spec.model, str(template.spec.block_size), str(template.spec.hash_profile)]


class Program(Contestant):
    """A baseline in C++, or in Python dicts, that loads a file."""

    def __init__(self, name: str, kind: str, write: Write, blocks_max: float, *, in_python: bool = False) -> None:
        super().__init__(name, blocks_max)
        self._kind = kind
        self._write = write
        self._in_python = in_python

    def missing(self) -> str | None:
        return "no g++" if not self._in_python and shutil.which("g++") is None else None

    def prepare(self, directory: Path, template: Template, replicas: int) -> None:
        save(directory / "snapshot", self._write, template, replicas)
        write_query(directory / "query", template, replicas)
        if self._kind == "image":
            (directory / "snapshot").rename(directory / "blocks")
            saved = [str(compiled(PROGRAM)), "save-image", str(directory / "blocks"), str(directory / "snapshot"), "0"]
            subprocess.run(saved, check=True)
            (directory / "blocks").unlink()

    def start(self, directory: Path, template: Template, replicas: int) -> Measured:
        if self._in_python:
            program = [sys.executable, "-m", "bench.baselines.dict_recovery"]
        else:
            program = [str(compiled(PROGRAM))]
        return run([*program, self._kind, str(directory / "snapshot"), str(directory / "query")])


class RedisServer(Contestant):
    """Redis, from its RDB file."""

    def __init__(self, name: str, kind: str, blocks_max: float) -> None:
        super().__init__(name, blocks_max)
        self._kind = kind

    def missing(self) -> str | None:
        return None if installed() else "no redis-server (Debian: redis-server)"

    def prepare(self, directory: Path, template: Template, replicas: int) -> None:
        Redis(directory, self._kind).fill(template.blocks_of(replicas), _block_ids(template, replicas))

    def start(self, directory: Path, template: Template, replicas: int) -> Measured:
        query = template.internal_query(len(template.paths) // 2, replicas - 1)
        return dict(Redis(directory, self._kind).reload(template.blocks_of(replicas), query))


def _block_ids(template: Template, replicas: int) -> Iterator[Words]:
    for replica in range(replicas):
        begin = template.shared_blocks if replica else 0
        yield template.home[begin:] ^ np.uint64(mask_of(replica))


def run(command: list[str]) -> Measured:
    """Run a program that ends its own measurement; the time of its start is its last argument."""
    done = subprocess.run([*command, str(time.monotonic_ns())], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stderr or done.returncode}")
    measured: Measured = json.loads(done.stdout)
    return measured


def all_contestants() -> list[Contestant]:
    """Ours first. The bounds are for 12 GB of memory and some minutes."""
    return [
        Ours(OURS, 1e9),
        Program("the same directory, rebuilt (C++)", "directory", write_directory, 1e9),
        Program("the same directory, read into place (C++)", "frozen", write_directory, 1e9),
        Program("the same directory, rebuilt (Python dict)", "directory", write_directory, 1e8, in_python=True),
        Program("Segment-Radix (C++)", "radix", write_radix, 3e8),
        Program("DRAM-BlockHash, its memory read back (C++)", "image", write_blocks, 3e8),
        Program("DRAM-BlockHash (C++)", "blocks", write_blocks, 3e8),
        Program("DRAM-BlockHash (Python dict)", "blocks", write_blocks, 1e7, in_python=True),
        *(
            RedisServer(f"Redis, a {kind} {'field' * (kind == 'hash')}".strip() + " a block", kind, 1e7)
            for kind in KINDS
        ),
    ]


def files_bytes(directory: Path) -> int:
    """Bytes of all that a contestant has saved, but for the question it will be asked."""
    return sum(path.stat().st_size for path in saved_files(directory))


def saved_files(directory: Path) -> list[Path]:
    """All that a contestant has saved."""
    return [path for path in directory.rglob("*") if path.is_file() and path.name not in ("query", "LOCK")]


def drop_page_cache(directory: Path) -> bool:
    """Let the kernel forget what is saved. False if it still has some of it."""
    for _ in range(DROPS_MAX):
        if sum(_dropped_but_for(path) for path in saved_files(directory)) == 0:
            return True
        time.sleep(DROP_PAUSE_S)  # somebody may still have had it open
    return False


def _dropped_but_for(path: Path) -> int:
    """How many of three pages of a file are still in memory, after the kernel was told to forget it."""
    kept = 0
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    size = os.fstat(descriptor).st_size
    for offset in (0, size // 2 & ~4095, max(0, size - 1) & ~4095):
        try:
            kept += os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            pass  # it is not in memory
    os.close(descriptor)
    return kept
