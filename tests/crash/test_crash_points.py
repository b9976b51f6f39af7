"""A power cut at each step of a workload, and again inside the recovery: what was acknowledged is there, and no more.

A failure names the command that repeats it. Sampled on each run; `make chaos` tries every point.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.crash_points import Point, Recorded, crash, sample
from tests.crash.workload import STEPS

POINTS_A_RUN = 12
WORKLOADS_A_RUN = (1, 2)
WORKLOADS = range(3, 13)
IMAGES = range(6)
SHARES = 8
"""Parts into which the points of a workload are divided, so that they can run in parallel."""


def record(tmp_path: Path, seed: int) -> Recorded:
    (tmp_path / "recorded").mkdir()
    return Recorded(tmp_path / "recorded", seed)


@pytest.mark.parametrize("seed", WORKLOADS_A_RUN)
def test_a_power_cut_at_some_points(tmp_path: Path, seed: int) -> None:
    recorded = record(tmp_path, seed)
    for point in sample(recorded, POINTS_A_RUN):
        crash(recorded, point, tmp_path / "point", again=1 + point.image % 2)


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("seed", WORKLOADS)
def test_a_power_cut_at_every_point(tmp_path: Path, seed: int, share: int) -> None:
    recorded = record(tmp_path, seed)
    for number in recorded.points[share::SHARES]:
        for image in IMAGES:
            crash(recorded, Point(seed, number, image), tmp_path / "point", again=2)


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", range(SHARES))
def test_a_power_cut_at_many_points_of_every_recovery(tmp_path: Path, share: int) -> None:
    recorded = record(tmp_path, 1)
    for number in recorded.points[share::SHARES]:
        crash(recorded, Point(1, number, 2 + number), tmp_path / "point", again=40)


def test_the_workload_meets_every_kind_of_operation(tmp_path: Path) -> None:
    """A crash point that no workload reaches proves nothing."""
    workload = record(tmp_path, 1).workload
    kinds = {type(operation).__name__ for operation in workload.files.operations}
    assert kinds >= {"Make", "Write", "Sync", "SyncDirectory"}
    assert [name for _, name in workload.began] == [name for name, _ in STEPS]
    entries = workload.ledger.at(workload.files.position)
    assert {entry.operation.kind for entry in entries} == {"insert", "remove", "clear"}
    assert {entry.outcome for entry in entries} == {"acked", "refused"}
    in_flight = [
        sum(entry.outcome == "pending" for entry in workload.ledger.at(moment))
        for moment in range(workload.files.position)
    ]
    assert max(in_flight) > 2


def test_the_same_seed_is_the_same_workload(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = Recorded(tmp_path / "a", 5).workload, Recorded(tmp_path / "b", 5).workload
    assert first.files.operations == second.files.operations
    assert first.ledger.at(10**6) == second.ledger.at(10**6)
