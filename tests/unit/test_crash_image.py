"""The model of a power cut: what was synced is certain; all that disks are known to do to the rest happens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sarp_cluster.storage.file_system import FileSystem
from sarp_cluster.testing.crash_file_system import CrashFileSystem, Sync, SyncDirectory
from sarp_cluster.testing.crash_image import SECTOR_BYTES, materialise

SEEDS = range(120)
Files = dict[str, bytes | None]


class Disk:
    """A directory with a CrashFileSystem over it."""

    def __init__(self, path: Path) -> None:
        self.root = path / "root"
        self.root.mkdir()
        self.images = path
        self.files = CrashFileSystem(self.root)

    def make(self, name: str, *writes: tuple[int, bytes], sync: bool = False) -> int:
        """A file with some writes. Returns its descriptor."""
        descriptor = self.files.create(self.root / name)
        for offset, data in writes:
            self.files.write(descriptor, data, offset)
        if sync:
            self.files.sync(descriptor)
            self.files.sync_directory(self.root)
        return descriptor

    def after(self, seed: int, crash: int | None = None) -> Files:
        """What a power cut leaves: contents by path, None for a directory."""
        crash = self.files.position if crash is None else crash
        image = self.images / f"image-{crash}-{seed}"
        materialise(self.files, crash, seed, image)
        found = {
            path.relative_to(image).as_posix(): None if path.is_dir() else path.read_bytes()
            for path in image.rglob("*")
        }
        shutil.rmtree(image)
        return found

    def all_after(self, crash: int | None = None) -> list[Files]:
        """What power cuts leave, by many seeds."""
        return [self.after(seed, crash) for seed in SEEDS]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def some(images: list[Files], condition: Callable[[Files], object]) -> bool:
    return any(condition(image) for image in images)


def every(images: list[Files], condition: Callable[[Files], object]) -> bool:
    return all(condition(image) for image in images)


OLD, NEW = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES


def test_what_was_synced_is_there(disk: Disk) -> None:
    disk.make("a", (0, b"hello"), sync=True)
    assert every(disk.all_after(), lambda image: image == {"a": b"hello"})


def test_what_was_there_at_the_beginning_is_there(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_bytes(b"before")
    files = CrashFileSystem(tmp_path / "root")
    materialise(files, 0, 0, tmp_path / "image")
    assert (tmp_path / "image" / "a").read_bytes() == b"before"


def test_without_a_sync_of_the_directory_the_name_may_be_lost(disk: Disk) -> None:
    descriptor = disk.make("a", (0, b"hello"))
    disk.files.sync(descriptor)
    images = disk.all_after()
    assert some(images, lambda image: image == {})
    assert some(images, lambda image: image == {"a": b"hello"})
    assert every(images, lambda image: image in ({}, {"a": b"hello"}))


def test_without_a_sync_of_the_file_its_contents_may_be_lost(disk: Disk) -> None:
    disk.make("a", (0, NEW * 3))
    disk.files.sync_directory(disk.root)
    images = disk.all_after()
    for wanted in (b"", bytes(3 * SECTOR_BYTES), NEW, NEW * 2, NEW * 3):
        assert wanted in [image["a"] for image in images]
    assert every(images, lambda image: set(image) == {"a"})


def test_a_sector_is_whole(disk: Disk) -> None:
    disk.make("a", (0, OLD * 4), sync=True)
    descriptor = disk.files.create(disk.root / "a", replace=True)
    disk.files.write(descriptor, NEW * 4, 0)
    for image in disk.all_after():
        data = image["a"]
        assert data is not None
        for at in range(0, len(data), SECTOR_BYTES):
            assert data[at : at + SECTOR_BYTES] in (OLD, NEW, bytes(SECTOR_BYTES))


def test_a_later_write_may_be_there_and_an_earlier_one_not(disk: Disk) -> None:
    descriptor = disk.make("a", sync=True)
    disk.files.write(descriptor, OLD, 0)
    disk.files.write(descriptor, NEW, SECTOR_BYTES)
    images = disk.all_after()
    for wanted in (b"", OLD, bytes(SECTOR_BYTES) + NEW, OLD + NEW):
        assert wanted in [image["a"] for image in images]


def test_a_sector_that_two_writes_share_keeps_what_was_synced_of_it(disk: Disk) -> None:
    descriptor = disk.make("a", (0, b"synced"), sync=True)
    disk.files.write(descriptor, b"not", 6)
    images = disk.all_after()
    assert every(images, lambda image: image["a"] in (b"synced", b"syncednot", b"synced\0\0\0"))
    assert some(images, lambda image: image["a"] == b"synced")


def test_a_sync_covers_what_was_there_when_it_began(disk: Disk) -> None:
    descriptor = disk.make("a", (0, OLD), sync=True)
    begun = disk.files.position
    disk.files.write(descriptor, NEW, SECTOR_BYTES)  # by another thread, while the sync ran
    disk.files.operations.append(Sync(0, begun))
    images = disk.all_after()
    assert some(images, lambda image: image["a"] == OLD)
    assert some(images, lambda image: image["a"] == OLD + NEW)


def test_what_a_failed_sync_was_to_cover_is_not_there_after_the_next(disk: Disk) -> None:
    """As on Linux: the next sync says that all is well, and the pages are gone."""
    descriptor = disk.make("a", sync=True)
    disk.files.write(descriptor, NEW, 0)
    disk.files.fault = lambda operation: OSError(5, "no") if isinstance(operation, Sync) else None
    with pytest.raises(OSError, match="no"):
        disk.files.sync(descriptor)
    disk.files.fault = None
    disk.files.write(descriptor, OLD, SECTOR_BYTES)
    disk.files.sync(descriptor)
    images = disk.all_after()
    assert some(images, lambda image: image["a"] == bytes(SECTOR_BYTES) + OLD)
    assert every(images, lambda image: (image["a"] or b"").endswith(OLD))


def test_an_operation_under_way_has_happened_or_not(disk: Disk) -> None:
    disk.make("a", (0, NEW * 2), sync=True)
    kinds = [type(operation).__name__ for operation in disk.files.operations]
    assert kinds == ["Make", "Write", "Sync", "SyncDirectory"]
    assert every(disk.all_after(0), lambda image: image in ({}, {"a": b""}))
    assert some(disk.all_after(2), lambda image: image.get("a") == NEW)
    assert some(disk.all_after(3), lambda image: image == {}), "its name is not synced yet"
    assert every(disk.all_after(3), lambda image: image in ({}, {"a": NEW * 2}))


def test_a_rename_happens_or_does_not(disk: Disk) -> None:
    disk.make("a", (0, b"old"), sync=True)
    disk.make("b", (0, b"new"), sync=True)
    disk.files.rename(disk.root / "b", disk.root / "a")
    images = disk.all_after()
    before, after = {"a": b"old", "b": b"new"}, {"a": b"new"}
    assert some(images, lambda image: image == before)
    assert some(images, lambda image: image == after)
    assert every(images, lambda image: image in (before, after))
    disk.files.sync_directory(disk.root)
    assert every(disk.all_after(), lambda image: image == after)


def test_a_file_that_is_renamed_before_its_sync_may_be_empty(disk: Disk) -> None:
    disk.make("a", (0, b"old"), sync=True)
    disk.make("b", (0, b"new"))
    disk.files.rename(disk.root / "b", disk.root / "a")
    disk.files.sync_directory(disk.root)
    assert some(disk.all_after(), lambda image: image == {"a": b""})


def test_an_unlink_may_be_undone_and_others_not(disk: Disk) -> None:
    disk.make("a", (0, b"1"), sync=True)
    disk.make("b", (0, b"2"), sync=True)
    disk.files.unlink(disk.root / "a")
    disk.files.unlink(disk.root / "b")
    images = disk.all_after()
    for names in ({"a", "b"}, {"a"}, {"b"}, set()):
        assert names in [set(image) for image in images]


def test_a_truncation_is_durable_when_it_returns(disk: Disk) -> None:
    disk.make("a", (0, b"hello"), sync=True)
    disk.files.truncate(disk.root / "a", 2)
    assert every(disk.all_after(), lambda image: image["a"] == b"he")
    under_way = disk.all_after(disk.files.position - 1)
    assert some(under_way, lambda image: image["a"] == b"he")
    assert some(under_way, lambda image: image["a"] == b"hello")


def test_what_stands_in_a_directory_is_lost_with_it(disk: Disk) -> None:
    disk.files.make_directory(disk.root / "d")
    descriptor = disk.files.create(disk.root / "d" / "a")
    disk.files.sync(descriptor)
    disk.files.sync_directory(disk.root / "d")
    images = disk.all_after()
    assert some(images, lambda image: image == {})
    assert every(images, lambda image: image in ({}, {"d": None, "d/a": b""}))
    disk.files.sync_directory(disk.root)
    assert every(disk.all_after(), lambda image: image == {"d": None, "d/a": b""})


def test_a_directory_outside_is_synced_and_forgotten(disk: Disk) -> None:
    disk.files.sync_directory(disk.root.parent)
    assert not [operation for operation in disk.files.operations if isinstance(operation, SyncDirectory)]


def test_a_write_that_does_not_fit_gets_half_way(disk: Disk) -> None:
    descriptor = disk.make("a", sync=True)
    disk.files.fault = lambda operation: OSError(28, "full")
    with pytest.raises(OSError, match="full"):
        disk.files.write(descriptor, b"1234", 0)
    assert (disk.root / "a").read_bytes() == b"12"
    assert disk.after(1)["a"] in (b"", b"12")


def test_the_same_seed_leaves_the_same(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    images = []
    for name in ("x", "y"):
        disk = Disk(tmp_path / name)
        disk.make("a", (0, NEW * 4), (4 * SECTOR_BYTES, OLD * 4))
        disk.make("b", (0, OLD))
        images.append(disk.all_after())
    assert images[0] == images[1]
    assert len({str(image) for image in images[0]}) > 10


def test_every_change_is_recorded() -> None:
    """A method that the real file system gets and this one does not would change the disk behind the record's back."""
    looking = {"names", "exists", "size", "read", "will_read", "space"}
    methods = {name for name in vars(FileSystem) if not name.startswith("_")}
    assert methods - looking <= set(vars(CrashFileSystem))
