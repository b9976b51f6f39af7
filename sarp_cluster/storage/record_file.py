"""A small file that is replaced as a whole: what a coordinator keeps, the last view of a node (docs/formats.md).

`RecordFile` is the `RecordStore` of sarp_cluster.cluster.membership. Its content is the old or the new one after
whatever happens, and damage is told from both: a header has its length and its checksum.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sarp_cluster.errors import CorruptRecordError, StorageError, StorePoisonedError
from sarp_cluster.storage.checksum import crc32c
from sarp_cluster.storage.file_system import DISK, FileSystem, run_to_end
from sarp_cluster.storage.store_directory import make

MAGIC: Final = b"SARPREC"
FORMAT_VERSION: Final = 1
HEADER: Final = struct.Struct("<8sQII")
"""Version, bytes of the content, zero, checksum of what is before it and of the content."""
CHECKED_BYTES: Final = HEADER.size - 4


def encode(content: bytes) -> bytes:
    """The bytes of a record file."""
    header = HEADER.pack(MAGIC + str(FORMAT_VERSION).encode(), len(content), 0, 0)[:CHECKED_BYTES]
    return header + struct.pack("<I", crc32c(content, crc32c(header))) + content


def decode(data: bytes, path: Path) -> bytes:
    """The content. Raises CorruptRecordError for damage, StorageError for a newer format."""
    if len(data) < HEADER.size:
        raise CorruptRecordError(f"{path}: cut short: {len(data)} bytes, its header alone has {HEADER.size}")
    version, length, _, checksum = HEADER.unpack_from(data)
    content = data[HEADER.size :]
    if not version.startswith(MAGIC):
        raise CorruptRecordError(f"{path}: offset 0: not a record file of ours")
    if crc32c(content, crc32c(data[:CHECKED_BYTES])) != checksum:
        raise CorruptRecordError(f"{path}: the checksum is wrong ({len(content)} bytes, its header says {length})")
    if version != MAGIC + str(FORMAT_VERSION).encode():
        raise StorageError(
            f"{path}: format version {version[len(MAGIC) :].decode(errors='replace')}, this program reads version "
            f"{FORMAT_VERSION}: open it with a newer program"
        )
    if length != len(content):
        raise CorruptRecordError(f"{path}: {len(content)} bytes of content, its header says {length}")
    return content


class RecordFile:
    """See RecordStore. Make one with `open`: one at a time has the file, in any process."""

    def __init__(self, path: Path, lock: int, file_system: FileSystem) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._lock: int | None = lock
        self._file_system = file_system
        self._poisoned: str | None = None
        self._writing = asyncio.Lock()  # held across our own disk only

    @classmethod
    async def open(cls, path: Path, file_system: FileSystem = DISK) -> RecordFile:
        """Lock the file, whose directory is made if it is not there. StorageError: another process has it."""

        def lock() -> int:
            make(path.parent, file_system)
            try:
                descriptor = file_system.lock(path.with_name(f"{path.name}.lock"))
            except BlockingIOError:
                raise StorageError(f"{path}: another process has it") from None
            try:
                # A process that was killed may have renamed and not come to the sync: what we are about to read, and to
                # act upon, must not be taken back by a power cut.
                file_system.sync_directory(path.parent)
            except BaseException:
                file_system.close(descriptor)
                raise
            return descriptor

        return cls(path, await run_to_end(lock, file_system.close), file_system)

    async def read(self) -> bytes | None:
        """See RecordStore.read. Raises CorruptRecordError, or StorageError for a newer format."""

        def read() -> bytes | None:
            try:
                return decode(self._file_system.read(self.path), self.path)
            except FileNotFoundError:
                return None

        return await run_to_end(read)

    async def write(self, content: bytes) -> None:
        """See RecordStore.write. Raises OSError, and after a sync that failed StorePoisonedError: end the process."""
        async with self._writing:
            if self._lock is None:
                raise StorageError(f"{self.path}: closed")
            if self._poisoned is not None:
                raise StorePoisonedError(self._poisoned)
            await run_to_end(lambda: self._write(encode(content)))

    def _write(self, data: bytes) -> None:
        file_system = self._file_system
        descriptor = file_system.create(self._temporary, replace=True)
        try:
            file_system.write(descriptor, data, 0)
            self._synced(lambda: file_system.sync(descriptor), self._temporary)
        finally:
            file_system.close(descriptor)
        file_system.rename(self._temporary, self.path)
        self._synced(lambda: file_system.sync_directory(self.path.parent), self.path.parent)

    def _synced(self, sync: Callable[[], None], what: Path) -> None:
        try:
            sync()
        except OSError as error:
            # Which content a restart finds is not known any more, and no later sync could tell.
            self._poisoned = f"{what}: a sync failed, nothing is written any more: {error}"
            raise StorePoisonedError(self._poisoned) from error

    async def close(self) -> None:
        """See RecordStore.close."""
        async with self._writing:
            if self._lock is not None:
                lock, self._lock = self._lock, None
                await run_to_end(lambda: self._file_system.close(lock))
