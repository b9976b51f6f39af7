"""The disk of one simulated process: it knows which locks the process holds, and fails once the process is dead."""

from __future__ import annotations

import errno
from pathlib import Path

from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.testing.simulated_loop import Node


class SimulatedDisk(FileSystem):
    """A FileSystem for one `Node`. What it wrote stays: a killed process loses nothing that it gave to the kernel."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def _check(self) -> None:
        if self._node.dead or self._node.buried:
            raise OSError(errno.EIO, f"{self._node.name} is dead")

    def lock(self, path: Path) -> int:
        """Lock a file for this process."""
        self._check()
        descriptor = super().lock(path)
        self._node.locks.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        self._node.locks.discard(descriptor)
        super().close(descriptor)

    def create(self, path: Path, *, replace: bool = False) -> int:
        """Create a file, if the process is alive."""
        self._check()
        return super().create(path, replace=replace)

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """Write, if the process is alive."""
        self._check()
        super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """Nothing that is simulated here needs it on the disk: power cuts have their own tests."""
        self._check()

    def sync_directory(self, directory: Path) -> None:
        """As `sync`."""
        self._check()

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file off, if the process is alive."""
        self._check()
        super().truncate(path, size)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, if the process is alive."""
        self._check()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if the process is alive."""
        self._check()
        super().unlink(path)
