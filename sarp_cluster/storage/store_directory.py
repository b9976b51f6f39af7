"""The directory of a store: what may stand in it, its lock, its secret.

LOCK                 held (flock) by the one process that has the store open
secret               32 random bytes that key the block IDs of its namespaces, unless the owner gives a secret
secret.tmp           a secret that was being made when the process ended
log-NNNNN.sarp       log files, see docs/formats.md
cut-NNNNN-OFFSET.sarp  a tail that recovery took out of a log file; nothing reads it, it may be deleted
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from sarp_cluster.errors import StorageError

LOCK_NAME: Final = "LOCK"
SECRET_NAME: Final = "secret"  # noqa: S105  # the name of a file
SECRET_TEMPORARY_NAME: Final = "secret.tmp"  # noqa: S105
SECRET_BYTES: Final = 32
LOG_NAME: Final = re.compile(r"log-(\d{5})\.sarp")
CUT_NAME: Final = re.compile(r"cut-\d{5}-\d+\.sarp")


def log_file_name(number: int) -> str:
    """Name of a log file."""
    return f"log-{number:05d}.sarp"


def cut_file_name(number: int, offset: int) -> str:
    """Name under which a torn tail is kept: from which log file, and from which offset of it."""
    return f"cut-{number:05d}-{offset}.sarp"


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(directory: Path) -> int:
    """Make the directory if it is not there, and lock it until the returned descriptor is closed.

    Raises StorageError when another process has it open.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StorageError(f"{directory} is open in another process; one writer a store") from None
    return descriptor


def log_files(directory: Path) -> dict[int, Path]:
    """The log files by number, in order. Raises StorageError for what does not belong into a store."""
    found: dict[int, Path] = {}
    for path in directory.iterdir():
        match = LOG_NAME.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
        elif path.name not in (LOCK_NAME, SECRET_NAME, SECRET_TEMPORARY_NAME) and not CUT_NAME.fullmatch(path.name):
            raise StorageError(f"{directory} is no store: it has {path.name} in it")
    return dict(sorted(found.items()))


def load_secret(directory: Path) -> bytes:
    """The store's own secret, made and synced before anything depends on it."""
    path = directory / SECRET_NAME
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        if log_files(directory):
            raise StorageError(f"{path} is missing: give the secret with which the store was made") from None
        secret = os.urandom(SECRET_BYTES)
        temporary = directory / SECRET_TEMPORARY_NAME
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secret)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
        sync_directory(directory)
    if len(secret) != SECRET_BYTES:
        raise StorageError(f"{path} has {len(secret)} bytes, not {SECRET_BYTES}")
    return secret
