"""Do the crash points bite? The product with a fault in it, and the check that has to find it.

Each fault is one that was made before, here or elsewhere: an acknowledgement before the sync, a directory that is not
synced, a checksum that is not looked at. What finds none of them proves nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sarp_cluster.errors import SarpError
from sarp_cluster.storage import log, recovery
from sarp_cluster.storage.checksum import crc32c
from sarp_cluster.storage.log_replay import LogReplay
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.manifest import Manifest
from sarp_cluster.storage.reclaim import RecordsInForce
from sarp_cluster.testing.crash_file_system import CrashFileSystem
from shard import insert_path, reclaim
from shard.snapshots import Frozen, Snapshots
from tests.crash.crash_points import Point, Recorded, crash, sample

POINTS_MAX = 60
FRAME_BYTES = 32
Patch = pytest.MonkeyPatch


async def _durable_at_once(state: object) -> bool:
    return True


def ack_before_sync(patch: Patch) -> None:
    patch.setattr(insert_path, "make_durable", _durable_at_once)


def no_file_sync(patch: Patch) -> None:
    patch.setattr(CrashFileSystem, "sync", lambda self, descriptor: None)


def no_directory_sync(patch: Patch) -> None:
    patch.setattr(CrashFileSystem, "sync_directory", lambda self, directory: None)


def no_sync_of_the_parent_directory(patch: Patch) -> None:
    real = CrashFileSystem.sync_directory

    def sync_directory(self: CrashFileSystem, directory: Path) -> None:
        if directory != self.root:
            real(self, directory)

    patch.setattr(CrashFileSystem, "sync_directory", sync_directory)


def secret_renamed_before_its_sync(patch: Patch) -> None:
    real = CrashFileSystem.create
    secrets: set[int] = set()

    def create(self: CrashFileSystem, path: Path, *, replace: bool = False) -> int:
        descriptor = real(self, path, replace=replace)
        (secrets.add if path.name == "secret.tmp" else secrets.discard)(descriptor)
        return descriptor

    sync = CrashFileSystem.sync
    patch.setattr(CrashFileSystem, "create", create)
    patch.setattr(CrashFileSystem, "sync", lambda self, to: None if to in secrets else sync(self, to))


def recovery_does_not_sync_what_it_builds_on(patch: Patch) -> None:
    patch.setattr(recovery, "_make_durable", lambda *arguments: None)


def groups_vouch_for_themselves(patch: Patch) -> None:
    class Boastful(LogTail):
        def begin_write(self, durable_lsn: int, vouch: bool = False) -> list[tuple[int, int, memoryview]]:
            return super().begin_write(self.lsn, vouch)

    patch.setattr(log, "LogTail", Boastful)


def checksum_skipped(patch: Patch) -> None:
    """Replay believes each frame: as if its checksum were right."""

    class Believing(LogReplay):
        def feed(self, data: Any, file: int, begin: int = 0, base: int = 0) -> int:
            return super().feed(with_right_checksums(data), file, begin, base)

    patch.setattr(recovery, "LogReplay", Believing)


def with_right_checksums(data: bytes) -> bytes:
    """The same log file; whatever looks like a frame verifies."""
    fixed = bytearray(data)
    for at in range(0, len(data) - FRAME_BYTES + 1, 8):
        if data[at : at + 2] == b"SR":
            (length,) = struct.unpack_from("<I", data, at + 4)
            payload = data[at + FRAME_BYTES : at + FRAME_BYTES + length]
            struct.pack_into("<I", fixed, at + 28, crc32c(payload, crc32c(data[at : at + 28])))
    return bytes(fixed)


def a_clear_is_not_logged(patch: Patch) -> None:
    real = log.LogStore.put_worker_mark

    def put_worker_mark(self: log.LogStore, worker: int, generation: int, seq: int, **named: bool) -> None:
        real(self, worker, 0, seq, **named)

    patch.setattr(log.LogStore, "put_worker_mark", put_worker_mark)


def a_removal_is_not_logged(patch: Patch) -> None:
    async def remove(state: object, *arguments: object, **named: object) -> int:
        return 0

    patch.setattr(insert_path, "remove", remove)


def a_file_is_deleted_before_that_is_recorded(patch: Patch) -> None:
    real = reclaim._Victim
    patch.setattr(reclaim, "_Victim", lambda number, size: real(number, size, copied=True, recorded=True, durable=True))


def names_of_a_reclaimed_file_are_not_put_again(patch: Patch) -> None:
    patch.setattr(reclaim.Reclaim, "_put_again", lambda self, victim: victim.others.clear())
    patch.setattr(RecordsInForce, "bytes_in", lambda self, file: 0)


def a_reclaimed_file_takes_its_removals_with_it(patch: Patch) -> None:
    """Its workers are put again, but not in which generation they are: what ended it is gone."""
    real = log.LogStore.put_worker_mark

    def put_worker_mark(
        self: log.LogStore, worker: int, generation: int, seq: int, *, reclaiming: bool = False
    ) -> None:
        if not reclaiming:
            real(self, worker, generation, seq)

    patch.setattr(log.LogStore, "put_worker_mark", put_worker_mark)


def a_snapshot_without_its_lsn(patch: Patch) -> None:
    """It says that it is of the moment at which it is published, and so that the log before is not needed."""
    real = Snapshots._manifest

    def manifest(self: Snapshots, frozen: Frozen, *arguments: Any) -> Manifest:
        store = self._state.store
        file, offset = store.position
        return real(self, frozen._replace(lsn=store.lsn, log_file=file, log_offset=offset), *arguments)

    patch.setattr(Snapshots, "_manifest", manifest)


class Fault(NamedTuple):
    """A fault, and what the check says of it."""

    put_in: Callable[[Patch], None]
    found: str
    workload: int = 1
    log_alone: bool = True


LOST = r"blocks, not \d|verified_blocks|matched_blocks"
DAMAGED = "damage|does not verify|missing|were durable"
FAULTS = (
    Fault(ack_before_sync, LOST),
    Fault(no_file_sync, f"{LOST}|{DAMAGED}"),
    Fault(no_directory_sync, LOST),
    Fault(no_sync_of_the_parent_directory, LOST),
    Fault(secret_renamed_before_its_sync, "secret", workload=2),
    Fault(recovery_does_not_sync_what_it_builds_on, f"{LOST}|{DAMAGED}"),
    Fault(groups_vouch_for_themselves, DAMAGED, workload=3),
    Fault(a_clear_is_not_logged, "came back"),
    Fault(a_removal_is_not_logged, "came back"),
    Fault(a_file_is_deleted_before_that_is_recorded, f"{LOST}|{DAMAGED}", log_alone=False),
    Fault(a_reclaimed_file_takes_its_removals_with_it, f"{LOST}|came back|were not found in it", log_alone=False),
    Fault(a_snapshot_without_its_lsn, f"{LOST}|came back|{DAMAGED}|makes no sense", log_alone=False),
    Fault(names_of_a_reclaimed_file_are_not_put_again, f"{LOST}|worker|not in the log", log_alone=False),
)


def crash_at_many_points(tmp_path: Path, seed: int, *, log_alone: bool) -> None:
    (tmp_path / "recorded").mkdir()
    recorded = Recorded(tmp_path / "recorded", seed, log_alone=log_alone)
    for point in (Point(seed, recorded.points[-1], 0), *sample(recorded, POINTS_MAX)):
        crash(recorded, point, tmp_path / "point", again=0)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.put_in.__name__)
def test_a_fault_is_found(tmp_path: Path, monkeypatch: Patch, fault: Fault) -> None:
    fault.put_in(monkeypatch)
    with pytest.raises((AssertionError, SarpError), match=fault.found):
        crash_at_many_points(tmp_path, fault.workload, log_alone=fault.log_alone)
