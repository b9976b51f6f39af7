"""A file system that remembers what was asked of it, so that a power cut can be tried at each single step.

It works on real files, which compiled code reads by descriptor, and keeps a record of every change and every sync.
`sarp_cluster.testing.crash_image` makes of it what a disk could hold had the power failed in between.

What stands in the directory at the beginning counts as being on the disk: a power cut lies before it, or a long time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sarp_cluster.storage.file_system import FileSystem

FileNumber = int
"""What an inode is to a kernel: a file by itself, whatever it is called and whether or not it still has a name."""


class Make(NamedTuple):
    """A new name: of a new file, or of a directory (no file)."""

    path: str
    file: FileNumber | None


class Write(NamedTuple):
    """Bytes at an offset of a file."""

    file: FileNumber
    offset: int
    data: bytes


class Truncate(NamedTuple):
    """A file gets another length."""

    file: FileNumber
    size: int


class Rename(NamedTuple):
    """A file gets another name, in place of any that has it."""

    source: str
    target: str
    file: FileNumber


class Unlink(NamedTuple):
    """A name is gone."""

    path: str
    file: FileNumber


class Sync(NamedTuple):
    """What was done to a file before the operation with the number `covers` is on the disk from here on.

    `failed`: it is not, and no later sync will put it there: the kernel has dropped it, or will (Linux does).
    """

    file: FileNumber
    covers: int
    failed: bool = False


class SyncDirectory(NamedTuple):
    """Names that were made, changed or removed in a directory before the operation `covers` are on the disk."""

    path: str
    covers: int


Operation = Make | Write | Truncate | Rename | Unlink | Sync | SyncDirectory

Fault = Callable[[Operation], OSError | None]
"""Asked before each operation: the error with which it is to fail, or None."""


class CrashFileSystem(FileSystem):
    """A FileSystem over everything in the directory `root`, with a record of its changes.

    Changes happen one at a time and enter the record as they are made. A sync covers what was there when it began, and
    enters when it has ended: whoever was promised something because of it was promised it later.
    """

    def __init__(self, root: Path, fault: Fault | None = None) -> None:
        self.root = root
        self.fault = fault
        self.operations: list[Operation] = []
        self.beginning: dict[str, bytes | None] = {}
        """What was there: contents by path, None for a directory."""
        self._files: dict[str, FileNumber] = {}
        self._opened: dict[int, FileNumber] = {}
        self._next_file = 0
        self._changing = threading.Lock()
        for path in sorted(root.rglob("*")):
            self.beginning[self._name(path)] = None if path.is_dir() else path.read_bytes()
            if not path.is_dir():
                self._new_file(path)

    @property
    def position(self) -> int:
        """How many operations there were: the number of the next one."""
        return len(self.operations)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _new_file(self, path: Path) -> FileNumber:
        number = self._files[self._name(path)] = self._next_file
        self._next_file += 1
        return number

    def _note(self, operation: Operation) -> None:
        """Enter an operation, unless it is to fail."""
        error = self.fault(operation) if self.fault is not None else None
        if error is not None:
            raise error
        self.operations.append(operation)

    # --- names --------------------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """See FileSystem."""
        with self._changing:
            if not path.exists():
                self._note(Make(self._name(path), None))
            super().make_directory(path)

    def create(self, path: Path, *, replace: bool = False) -> int:
        """See FileSystem."""
        with self._changing:
            if not path.exists():
                self._note(Make(self._name(path), self._next_file))
                self._new_file(path)
            elif replace:
                self._note(Truncate(self._files[self._name(path)], 0))
            return self._open(path, super().create(path, replace=replace))

    def lock(self, path: Path) -> int:
        """See FileSystem."""
        with self._changing:
            if not path.exists():
                self._note(Make(self._name(path), self._next_file))
                self._new_file(path)
            return self._open(path, super().lock(path))

    def rename(self, source: Path, target: Path) -> None:
        """See FileSystem."""
        with self._changing:
            file = self._files[self._name(source)]
            self._note(Rename(self._name(source), self._name(target), file))
            super().rename(source, target)
            self._files[self._name(target)] = self._files.pop(self._name(source))

    def unlink(self, path: Path) -> None:
        """See FileSystem."""
        with self._changing:
            self._note(Unlink(self._name(path), self._files[self._name(path)]))
            super().unlink(path)
            del self._files[self._name(path)]

    def sync_directory(self, directory: Path) -> None:
        """See FileSystem."""
        covers = self.position
        super().sync_directory(directory)
        if directory.is_relative_to(self.root):
            with self._changing:
                self._note(SyncDirectory(self._name(directory), covers))

    # --- contents -----------------------------------------------------------------------------------------------------

    def open_to_read(self, path: Path) -> int:
        """See FileSystem."""
        with self._changing:
            return self._open(path, super().open_to_read(path))

    def _open(self, path: Path, descriptor: int) -> int:
        self._opened[descriptor] = self._files[self._name(path)]
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """See FileSystem. One that is to fail gets half way."""
        with self._changing:
            file = self._opened[descriptor]
            try:
                self._note(Write(file, offset, bytes(data)))
            except OSError:
                half = bytes(data[: len(data) // 2])
                self.operations.append(Write(file, offset, half))
                super().write(descriptor, half, offset)
                raise
            super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """See FileSystem."""
        file, covers = self._opened[descriptor], self.position
        super().sync(descriptor)
        self._synced(file, covers)

    def _synced(self, file: FileNumber, covers: int) -> None:
        with self._changing:
            try:
                self._note(Sync(file, covers))
            except OSError:
                self.operations.append(Sync(file, covers, failed=True))
                raise

    def truncate(self, path: Path, size: int) -> None:
        """See FileSystem. Two operations: the power can fail between the cut and its sync."""
        with self._changing:
            file = self._files[self._name(path)]
            self._note(Truncate(file, size))
            covers = self.position
            super().truncate(path, size)
        self._synced(file, covers)

    def close(self, descriptor: int) -> None:
        """See FileSystem."""
        with self._changing:
            del self._opened[descriptor]
            super().close(descriptor)
