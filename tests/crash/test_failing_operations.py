"""Each operation on the disk fails, once or some times: a sync, a name, a write that does not fit.

A failed sync of the log ends all promises: nothing is acknowledged after it, and it is not synced again. A full disk
ends nothing: what is new is refused until there is space. Afterwards the power fails, and what was acknowledged is
there.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Final

import pytest

from sarp_cluster.errors import SarpError, StorageError, StorePoisonedError
from sarp_cluster.testing.crash_file_system import (
    CrashFileSystem,
    Make,
    Operation,
    Rename,
    Sync,
    SyncDirectory,
    Truncate,
    Write,
)
from tests.crash.crash_points import Point, Recorded, crash

Kinds = tuple[type[Operation], ...]
SYNCS: Final[Kinds] = (Sync, SyncDirectory)
SPACE: Final[Kinds] = (Write, Make)
CHANGES: Final[Kinds] = (Write, Make, Rename, Truncate)
SEED: Final = 2
"""Of the workload: one with a secret of its own, which is renamed into place."""
LAST: Final = 90
"""Operations of one kind that a workload has, about."""


class Failing:
    """Some operations fail: of these kinds, those with the numbers first, first + 1, …"""

    def __init__(self, kinds: Kinds, error: int, first: int, times: int = 1) -> None:
        self.kinds, self.error, self.first, self.times = kinds, error, first, times
        self.count = 0

    def __call__(self, operation: Operation) -> OSError | None:
        """The error with which an operation is to fail."""
        self.count += isinstance(operation, self.kinds)
        if isinstance(operation, self.kinds) and self.first <= self.count < self.first + self.times:
            return OSError(self.error, os.strerror(self.error))
        return None

    @property
    def failed(self) -> bool:
        """Has it come to that?"""
        return self.count >= self.first


def recorded_with(tmp_path: Path, failing: Failing) -> Recorded:
    (tmp_path / "recorded").mkdir()
    print(f"of {failing.kinds}, number {failing.first} fails, {failing.times} times")  # noqa: T201
    return Recorded(tmp_path / "recorded", SEED, fault=failing)


def cut_the_power_afterwards(recorded: Recorded, tmp_path: Path, *, also: int = 0) -> None:
    """At the end, and at some points before."""
    chosen = random.Random(recorded.workload.files.position).choices(recorded.points, k=also)
    for image, number in enumerate([recorded.points[-1]] * 4 + chosen):
        crash(recorded, Point(SEED, number, image), tmp_path / "point", again=0)


def fail(tmp_path: Path, kinds: Kinds, error: int, number: int) -> None:
    """An operation fails for good: the store is poisoned, or it did not open."""
    failing = Failing(kinds, error, number)
    recorded = recorded_with(tmp_path, failing)
    if not failing.failed:
        return
    if kinds == SYNCS or recorded.error is not None:  # else the process was killed before it could tell anybody
        assert isinstance(recorded.error, StorePoisonedError | OSError), recorded.error
    ledger, operations = recorded.workload.ledger, recorded.workload.files.operations
    ended = [entry.outcome for entry in ledger.at(len(operations))]
    logs = {each.file for each in operations if isinstance(each, Make) and "log-" in each.path}
    for i, operation in enumerate(operations):
        if not (isinstance(operation, Sync) and operation.failed and operation.file in logs):
            continue  # a snapshot that fails leaves the log as good as it was
        acked = [entry.outcome for entry in ledger.at(i)].count("acked")
        assert ended.count("acked") == acked, "something was acknowledged after a sync had failed"
        again = [each for each in operations[i + 1 :] if isinstance(each, Sync) and each.file in logs]
        assert not again, "the log was synced again"
    cut_the_power_afterwards(recorded, tmp_path)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 20, 33, 60, 61, 62])
def test_a_sync_fails(tmp_path: Path, number: int) -> None:
    fail(tmp_path, SYNCS, errno.EIO, number)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 21])
def test_a_change_fails(tmp_path: Path, number: int) -> None:
    fail(tmp_path, CHANGES, errno.EIO, number)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", [SYNCS, CHANGES], ids=["sync", "change"])
@pytest.mark.parametrize("number", range(1, 2 * LAST))
def test_every_operation_fails(tmp_path: Path, kinds: Kinds, number: int) -> None:
    fail(tmp_path, kinds, errno.EIO, number)


def fill_up(tmp_path: Path, number: int, times: int, error: int = errno.ENOSPC) -> None:
    """Some writes do not fit, then there is space again."""
    failing = Failing(SPACE, error, number, times)
    recorded = recorded_with(tmp_path, failing)
    if not failing.failed:
        return
    entries = recorded.workload.ledger.at(recorded.workload.files.position)
    if isinstance(recorded.error, OSError):
        assert recorded.workload.step_at(recorded.workload.files.position) == "opening", recorded.error
    else:
        assert recorded.error is None, recorded.error
        if failing.count > failing.first + failing.times + 8:  # or it is the last insert that did not fit
            assert entries[-1].outcome == "acked", "inserts did not go on after there was space"
    cut_the_power_afterwards(recorded, tmp_path, also=3)


@pytest.mark.parametrize(("number", "times"), [(1, 1), (3, 1), (4, 1), (5, 1), (6, 2), (11, 5), (23, 1), (34, 2)])
def test_a_write_does_not_fit(tmp_path: Path, number: int, times: int) -> None:
    fill_up(tmp_path, number, times)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize("number", range(1, LAST))
def test_every_write_does_not_fit(tmp_path: Path, number: int, times: int) -> None:
    fill_up(tmp_path, number, times, errno.ENOSPC if number % 2 else errno.EDQUOT)


def test_a_sync_that_is_tried_again_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of many databases until 2018: the second sync says that all is well."""
    sync = CrashFileSystem.sync

    def again(self: CrashFileSystem, descriptor: int) -> None:
        try:
            sync(self, descriptor)
        except OSError:
            sync(self, descriptor)

    monkeypatch.setattr(CrashFileSystem, "sync", again)
    (tmp_path / "recorded").mkdir()
    recorded = Recorded(tmp_path / "recorded", SEED, fault=Failing((Sync,), errno.EIO, 5), log_alone=True)
    assert recorded.error is None
    with pytest.raises((AssertionError, SarpError), match=r"blocks|were durable"):
        cut_the_power_afterwards(recorded, tmp_path, also=40)


def test_a_store_that_failed_to_open_is_not_left_locked(tmp_path: Path) -> None:
    """The first sync of a new store is that of its directory's name."""
    recorded = recorded_with(tmp_path, Failing(SYNCS, errno.EIO, 1))
    assert isinstance(recorded.error, OSError)
    assert not isinstance(recorded.error, StorageError)
    assert not recorded.workload.files._opened
