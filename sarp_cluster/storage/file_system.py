"""The one door to the disk: every change that sarp_cluster.storage makes to it goes through a FileSystem.

It passes on what it is asked, nothing more, so that a test can put another in its place: one that forgets what was
not synced (sarp_cluster.testing.crash_file_system), or that fails. Segments are read past it, by descriptor, in
compiled code.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

Result = TypeVar("Result")


class FileSystem:
    """The disk as the operating system has it. All methods may wait for it: call them in a helper thread.

    Nothing is durable before it is synced: what a file holds by `sync`, `truncate` for itself; names that were made,
    changed or removed by `sync_directory` on the directory in which they stand.
    """

    # --- looking ------------------------------------------------------------------------------------------------------

    def names(self, directory: Path) -> list[str]:
        """Names of all that stands in a directory, in no order."""
        return os.listdir(directory)

    def exists(self, path: Path) -> bool:
        """Is there a file or directory of this name?"""
        return path.exists()

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return path.stat().st_size

    def read(self, path: Path, begin: int = 0, length: int | None = None) -> bytes:
        """All of a file, or what there is of it from an offset on, up to so many bytes."""
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            wanted = max(0, os.fstat(file.fileno()).st_size - begin)
            wanted = wanted if length is None else min(length, wanted)
            data = file.read(wanted)
            while len(data) < wanted and (more := file.read(wanted - len(data))):
                data += more
        return data

    def will_read(self, path: Path, begin: int) -> None:
        """A file is read from an offset on soon: the disk may begin with all of it now. Does not wait for that."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, begin, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def open_to_read(self, path: Path) -> int:
        """A descriptor of a file that is there, to read from and to `sync`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def space(self, directory: Path) -> tuple[int, int]:
        """(bytes free, bytes in all) of the disk on which a directory stands; (0, 0) where it does not say."""
        disk = os.statvfs(directory)
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize

    # --- changing -----------------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """Make a directory that only its owner may look into."""
        path.mkdir(mode=0o700)

    def create(self, path: Path, *, replace: bool = False) -> int:
        """A descriptor of a new file. One of that name is an error, or with `replace` emptied."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
        return os.open(path, flags, mode=0o600)

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at an offset of a file that `create` made."""
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)

    def sync(self, descriptor: int) -> None:
        """Make durable what was written to a file. If it fails, never again: what was written may be gone."""
        os.fdatasync(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file off, and make that and the rest of it durable."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, in place of any that has it."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file. Who has it open can still read it."""
        os.unlink(path)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: Path) -> int:
        """Lock a file, made if it is not there, until the returned descriptor is closed.

        Raises BlockingIOError when another process, or another descriptor of this one, has it locked.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close a descriptor of any of the above."""
        os.close(descriptor)


DISK: Final = FileSystem()
"""The real one."""


async def run_to_end(call: Callable[[], Result], undo: Callable[[Result], object] | None = None) -> Result:
    """Call something that changes the disk in a helper thread.

    Who is cancelled meanwhile waits until the thread has ended, and `undo` gets what it returned: afterwards nothing of
    it goes on behind the caller's back, and nothing that it opened stays open.
    """
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                pass  # we are about to raise the first one
        if running.exception() is None and undo is not None:
            undo(running.result())
        raise
