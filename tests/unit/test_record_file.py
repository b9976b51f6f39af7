"""Record files: the old content or the new one, whatever happens; damage is recognised; one process has it."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sarp_cluster.errors import CorruptRecordError, StorageError, StorePoisonedError
from sarp_cluster.storage.checksum import crc32c
from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.storage.record_file import CHECKED_BYTES, HEADER, MAGIC, RecordFile, decode, encode
from sarp_cluster.testing.crash_file_system import CrashFileSystem, Operation, Rename, Sync, SyncDirectory, Write
from sarp_cluster.testing.crash_image import materialise
from tests.crash.virtual_time import run

IMAGES = range(8)
CONTENTS = (b"first", b"second" * 300, b"", b"third " * 2_000)
"""Of less than a sector, and of several."""


async def written(path: Path, *contents: bytes, file_system: FileSystem | None = None) -> None:
    file = await RecordFile.open(path, file_system or FileSystem())
    try:
        for content in contents:
            await file.write(content)
    finally:
        await file.close()


async def content_of(path: Path) -> bytes | None:
    file = await RecordFile.open(path)
    try:
        return await file.read()
    finally:
        await file.close()


async def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / "records"
    assert await content_of(path) is None
    for content in CONTENTS:
        await written(path, b"before", content)
        assert await content_of(path) == content


def test_every_changed_byte_and_every_length_is_found() -> None:
    data = encode(b"some content")
    for at in range(len(data)):
        with pytest.raises(CorruptRecordError, match=r"^f: "):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], Path("f"))
        with pytest.raises(CorruptRecordError, match=r"^f: "):
            decode(data[:at], Path("f"))
    with pytest.raises(CorruptRecordError):
        decode(data + b"\0", Path("f"))
    assert decode(data, Path("f")) == b"some content"


def test_a_length_that_is_not_the_files_is_found_although_the_checksum_is_right() -> None:
    header = HEADER.pack(MAGIC + b"1", 5, 0, 0)[:CHECKED_BYTES]
    data = header + crc32c(b"four", crc32c(header)).to_bytes(4, "little") + b"four"
    with pytest.raises(CorruptRecordError, match="4 bytes of content, its header says 5"):
        decode(data, Path("f"))


def test_a_newer_format_is_refused() -> None:
    header = HEADER.pack(MAGIC + b"2", 4, 0, 0)[:CHECKED_BYTES]
    data = header + crc32c(b"four", crc32c(header)).to_bytes(4, "little") + b"four"
    with pytest.raises(StorageError, match=r"format version 2.*newer program"):
        decode(data, Path("f"))


async def test_a_second_one_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    file = await RecordFile.open(tmp_path / "records")
    with pytest.raises(StorageError, match="another process has it"):
        await RecordFile.open(tmp_path / "records")
    other = await RecordFile.open(tmp_path / "others")  # beside it: another file
    await other.close()
    await file.close()
    await file.close()
    with pytest.raises(StorageError, match="closed"):
        await file.write(b"")
    await written(tmp_path / "records", b"now")


async def test_another_process_has_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom sarp_cluster.storage.record_file import RecordFile\n"
        "async def main():\n    file = await RecordFile.open(Path(sys.argv[1]))\n    print('has it', flush=True)\n"
        "    sys.stdin.read()\nasyncio.run(main())\n"
    )

    def other() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, str(tmp_path / "records")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        assert process.stdout is not None
        assert process.stdout.readline() == b"has it\n"
        return process

    process = await asyncio.to_thread(other)
    try:
        with pytest.raises(StorageError, match="another process has it"):
            await RecordFile.open(tmp_path / "records")
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
    await written(tmp_path / "records", b"mine")


async def test_writes_come_one_after_the_other(tmp_path: Path) -> None:
    file = await RecordFile.open(tmp_path / "records")
    await asyncio.gather(*(file.write(str(number).encode() * 1_000) for number in range(20)))
    assert await file.read() == b"19" * 1_000
    await file.close()
    assert sorted(os.listdir(tmp_path)) == ["records", "records.lock"]


async def test_a_write_that_is_cancelled_does_not_go_on_behind_its_caller(tmp_path: Path) -> None:
    class Slow(FileSystem):
        begun, go_on = threading.Event(), threading.Event()

        def sync(self, descriptor: int) -> None:
            self.begun.set()
            self.go_on.wait(30)
            super().sync(descriptor)

    slow = Slow()
    file = await RecordFile.open(tmp_path / "records", slow)
    writing = asyncio.create_task(file.write(b"content"))
    await asyncio.to_thread(slow.begun.wait, 30)
    writing.cancel()
    await asyncio.sleep(0)
    assert not writing.done()
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await file.write(b"the next")
    assert await file.read() == b"the next"
    await file.close()


# --- crashes and errors -----------------------------------------------------------------------------------------------


def test_after_a_power_cut_at_any_operation_it_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    files = CrashFileSystem(root)
    acknowledged: list[tuple[int, bytes | None]] = [(0, None)]

    async def work() -> None:
        file = await RecordFile.open(root / "deep" / "records", files)
        for content in CONTENTS:
            await file.write(content)
            acknowledged.append((files.position, content))
        await file.close()

    run(work)
    for crash in range(files.position + 1):
        done = [content for position, content in acknowledged if position <= crash]
        allowed = {done[-1], *CONTENTS[len(done) - 1 : len(done)]}
        for image in IMAGES:
            disk = tmp_path / f"{crash}-{image}"
            materialise(files, crash, image, disk)
            found = run(lambda disk=disk: content_of(disk / "deep" / "records"))  # type: ignore[misc]
            assert found in allowed, f"crash {crash}, image {image}"


def test_what_was_read_after_a_kill_is_not_taken_back_by_a_power_cut(tmp_path: Path) -> None:
    """The killed process had renamed, and not synced the directory: page cache and disk differ."""
    root = tmp_path / "root"
    root.mkdir()

    def killed(operation: Operation) -> OSError | None:
        return OSError(errno.EIO, "killed here") if isinstance(operation, SyncDirectory) and killing else None

    killing = False
    files = CrashFileSystem(root, killed)

    async def work() -> bytes | None:
        nonlocal killing
        first = await RecordFile.open(root / "records", files)
        await first.write(b"old")
        killing = True
        with pytest.raises(StorePoisonedError):
            await first.write(b"new")
        killing = False
        await first.close()
        second = await RecordFile.open(root / "records", files)
        content = await second.read()
        await second.close()
        return content

    assert run(work) == b"new"
    for image in IMAGES:
        materialise(files, files.position, image, tmp_path / str(image))
        assert run(lambda image=image: content_of(tmp_path / str(image) / "records")) == b"new"  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Write, Rename])
async def test_a_full_disk_leaves_the_old_content_and_the_next_write_succeeds(
    tmp_path: Path, kind: type[Operation]
) -> None:
    full = False

    def fault(operation: Operation) -> OSError | None:
        return OSError(errno.ENOSPC, "full") if full and isinstance(operation, kind) else None

    file = await RecordFile.open(tmp_path / "records", await asyncio.to_thread(CrashFileSystem, tmp_path, fault))
    await file.write(b"old")
    full = True
    with pytest.raises(OSError, match="full"):
        await file.write(b"new" * 1_000)
    assert await file.read() == b"old"
    full = False
    await file.write(b"newer")
    assert await file.read() == b"newer"
    await file.close()


@pytest.mark.parametrize("kind", [Sync, SyncDirectory])
async def test_after_a_sync_that_failed_nothing_is_written_and_nothing_synced(
    tmp_path: Path, kind: type[Operation]
) -> None:
    syncs: list[Operation] = []
    failing = False

    def fault(operation: Operation) -> OSError | None:
        if failing:
            syncs.append(operation)
        return OSError(errno.EIO, "broken") if failing and isinstance(operation, kind) else None

    file = await RecordFile.open(tmp_path / "records", await asyncio.to_thread(CrashFileSystem, tmp_path, fault))
    await file.write(b"old")
    failing = True
    with pytest.raises(StorePoisonedError, match="a sync failed"):
        await file.write(b"new")
    before = len(syncs)
    for _ in range(3):
        with pytest.raises(StorePoisonedError, match="a sync failed"):
            await file.write(b"newer")
    assert len(syncs) == before
    await file.close()
