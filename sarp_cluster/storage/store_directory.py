"""The directory of a store: what may stand in it, its lock, its secret.

LOCK                 held (flock) by the one process that has the store open
secret               32 random bytes that key the block IDs of its namespaces, unless the owner gives a secret
secret.tmp           a secret that was being made when the process ended
log-NNNNN.sarp       log files, see docs/formats.md
run-NNNNNN.sarp      runs: sorted changes of the index, see docs/formats.md
manifest-NNNNNN.sarp   snapshots: which runs are the index at which LSN; .tmp: one that was being written; .bad: one
                     that names a run which is damaged
cut-NNNNN-OFFSET.sarp  a tail that recovery took out of a log file; nothing reads it, it may be deleted
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from sarp_cluster.errors import StorageError
from sarp_cluster.storage.file_system import DISK, FileSystem

LOCK_NAME: Final = "LOCK"
SECRET_NAME: Final = "secret"  # noqa: S105  # the name of a file
SECRET_TEMPORARY_NAME: Final = "secret.tmp"  # noqa: S105
SECRET_BYTES: Final = 32
LOG_NAME: Final = re.compile(r"log-(\d{5})\.sarp")
RUN_NAME: Final = re.compile(r"run-(\d{6})\.sarp")
MANIFEST_NAME: Final = re.compile(r"manifest-(\d{6})\.(sarp|tmp|bad)")
CUT_NAME: Final = re.compile(r"cut-\d{5}-\d+\.sarp")


def log_file_name(number: int) -> str:
    """Name of a log file."""
    return f"log-{number:05d}.sarp"


def cut_file_name(number: int, offset: int) -> str:
    """Name under which a torn tail is kept: from which log file, and from which offset of it."""
    return f"cut-{number:05d}-{offset}.sarp"


def lock(directory: Path, file_system: FileSystem = DISK) -> int:
    """Make the directory if it is not there, and lock it until the returned descriptor is closed.

    Raises StorageError when another process has it open.
    """
    make(directory, file_system)
    try:
        return file_system.lock(directory / LOCK_NAME)
    except BlockingIOError:
        raise StorageError(f"{directory} is open in another process; one writer a store") from None


def make(directory: Path, file_system: FileSystem) -> None:
    """Make a directory and those above it, each durable before anything in it is."""
    if file_system.exists(directory):
        return
    make(directory.parent, file_system)
    try:
        file_system.make_directory(directory)
    except FileExistsError:
        pass  # another process was faster
    file_system.sync_directory(directory.parent)


def keep(directory: Path, file_system: FileSystem = DISK) -> None:
    """Make the name of a new store durable: a process that was killed may have made it and not come to that."""
    try:
        file_system.sync_directory(directory.parent)
    except PermissionError:
        pass  # above it nothing is ours: it was made for us, before this process began


def log_files(directory: Path, file_system: FileSystem = DISK) -> dict[int, Path]:
    """The log files by number, in order. Raises StorageError for what does not belong into a store."""
    found: dict[int, Path] = {}
    for name in file_system.names(directory):
        match = LOG_NAME.fullmatch(name)
        if match:
            found[int(match[1])] = directory / name
        elif name not in (LOCK_NAME, SECRET_NAME, SECRET_TEMPORARY_NAME) and not any(
            pattern.fullmatch(name) for pattern in (CUT_NAME, RUN_NAME, MANIFEST_NAME)
        ):
            raise StorageError(f"{directory} is no store: it has {name} in it")
    return dict(sorted(found.items()))


def snapshot_numbers(file_system: FileSystem, directory: Path) -> list[int]:
    """Numbers of the runs and manifests that are there, of any kind."""
    return [
        int(match[1])
        for name in file_system.names(directory)
        if (match := RUN_NAME.fullmatch(name) or MANIFEST_NAME.fullmatch(name))
    ]


def load_secret(directory: Path, file_system: FileSystem = DISK) -> bytes:
    """The store's own secret, made and synced before anything depends on it."""
    path = directory / SECRET_NAME
    try:
        secret = file_system.read(path)
    except FileNotFoundError:
        if log_files(directory, file_system):
            raise StorageError(f"{path} is missing: give the secret with which the store was made") from None
        secret = os.urandom(SECRET_BYTES)
        temporary = directory / SECRET_TEMPORARY_NAME
        descriptor = file_system.create(temporary, replace=True)
        try:
            file_system.write(descriptor, secret, 0)
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
        file_system.rename(temporary, path)
        file_system.sync_directory(directory)
    if len(secret) != SECRET_BYTES:
        raise StorageError(f"{path} has {len(secret)} bytes, not {SECRET_BYTES}")
    return secret
