"""Power cuts at chosen points of a recorded workload, and again inside the recovery from each: what must hold then.

    python -m tests.crash.crash_points --workload N --crash N --image N     one point again, as a failure names it

After each: acked <= state <= acked + in flight, nothing removed comes back, `validate()` holds, `verify` finds nothing
but a torn tail before the recovery and nothing at all after it, the store can be gone on with; and a recovery that is
cut off itself ends, done again, in the same state.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sarp_cluster.errors import StorageError
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.crash_file_system import CrashFileSystem, Fault
from sarp_cluster.testing.crash_image import describe, materialise
from sarp_cluster.testing.reference_index import Answer
from shard.index import Index
from tests.crash.check import Bounds, bounds_of, check_index
from tests.crash.ledger import Entry
from tests.crash.virtual_time import run
from tests.crash.workload import AFTERWARDS, STEPS, STORE_NAME, Step, Workload


class Point(NamedTuple):
    """One power cut."""

    workload: int
    crash: int
    image: int

    @property
    def command(self) -> str:
        """What repeats it."""
        return (
            f"python -m tests.crash.crash_points --workload {self.workload} --crash {self.crash} --image {self.image}"
        )


class Recorded:
    """A workload that was run, and the bounds of what may be found after a crash at each moment of it."""

    def __init__(self, root: Path, seed: int, *, fault: Fault | None = None, log_alone: bool = False) -> None:
        self.seed = seed
        self.workload = Workload(root, seed, fault=fault, log_alone=log_alone)
        self.repeatable = fault is None and not log_alone
        """By the command that a point names; else by the test."""
        self.error: Exception | None = None
        """What ended the workload before its time; only where there is a fault."""
        try:
            run(lambda: self.workload.run(STEPS), seed)
        except (StorageError, OSError) as error:
            if fault is None:
                raise
            self.error = error
        self._bounds: dict[tuple[Entry, ...], Bounds] = {}

    @property
    def points(self) -> range:
        """Each operation during which the power can fail, and the moment after the last."""
        return range(self.workload.files.position + 1)

    def bounds(self, entries: list[Entry]) -> Bounds:
        """What may be found; many moments share it."""
        key = tuple(entries)
        if key not in self._bounds:
            self._bounds[key] = bounds_of(entries)
        return self._bounds[key]


@contextmanager
def told(where: str) -> Iterator[None]:
    """Say at a failure where it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(where)
        raise


def _at(files: CrashFileSystem, crash: int) -> str:
    return describe(files.operations[crash]) if crash < files.position else "the end"


def _verify(store: Path, *, torn_tail_allowed: bool) -> None:
    if store.is_dir():
        wrong = [each for each in verify(store).findings if not (each.harmless and torn_tail_allowed)]
        assert not wrong, f"verify: {wrong}"


class _Recovery:
    """The recovery from one power cut, recorded, and what the store was gone on with."""

    def __init__(self, disk: Path, seed: int, entries: list[Entry], *, log_alone: bool) -> None:
        self.workload = Workload(disk, seed, before=entries, log_alone=log_alone)
        self.recovered_at = 0
        """Position of the record at which the recovery had ended."""
        self.answers: list[Answer] = []

    async def run(self, bounds: Bounds) -> None:
        async def check(workload: Workload) -> None:
            self.recovered_at = workload.files.position
            self.answers = await check_index(workload.index, bounds)

        await self.workload.run((Step("check", check), *AFTERWARDS))


def crash(recorded: Recorded, point: Point, directory: Path, *, again: int) -> None:
    """Cut the power at a point, recover, check, go on; then cut it at `again` points of that.

    Raises at whatever is wrong.
    """
    files = recorded.workload.files
    step, again_by = recorded.workload.step_at(point.crash), point.command if recorded.repeatable else "this test"
    where = f"in step {step!r}, at {_at(files, point.crash)}, image {point.image}\nagain: {again_by}"
    rng = random.Random(f"{point}/again")
    with told(where), _emptied(directory):
        disk = directory / "crashed"
        materialise(files, point.crash, point.image, disk)
        _verify(disk / STORE_NAME, torn_tail_allowed=True)
        entries = recorded.workload.ledger.at(point.crash)
        recovery = _Recovery(disk, recorded.seed + 2 * point.crash, entries, log_alone=recorded.workload.log_alone)
        bounds = recorded.bounds(entries)
        run(lambda: recovery.run(bounds), point)
        _verify(disk / STORE_NAME, torn_tail_allowed=False)
        inside = range(recovery.recovered_at)
        behind = range(recovery.recovered_at, recovery.workload.files.position + 1)
        for i in range(again):
            second = rng.choice(inside if i % 2 == 0 else behind)
            _crash_again(recorded, recovery, second, rng.randrange(100), directory / f"again-{i}")


def _crash_again(recorded: Recorded, recovery: _Recovery, crash: int, image: int, disk: Path) -> None:
    """Cut the power in a recovery, or in what followed it, and recover from that."""
    files = recovery.workload.files
    bounds = recorded.bounds(recovery.workload.ledger.at(crash))
    what = "the recovery" if crash < recovery.recovered_at else "what followed the recovery"
    with told(f"and again in {what}, at {_at(files, crash)} ({crash}, image {image})"):
        materialise(files, crash, image, disk)

        async def check() -> None:
            index = await Index.open(disk / STORE_NAME, recovery.workload.config, secret=recovery.workload.secret)
            try:
                answers = await check_index(index, bounds)
            finally:
                await index.close()
            if crash < recovery.recovered_at:
                assert answers == recovery.answers, "the second recovery answers otherwise than the first"

        run(check, image)
        _verify(disk / STORE_NAME, torn_tail_allowed=False)


@contextmanager
def _emptied(directory: Path) -> Iterator[None]:
    """A directory that is there, and is gone afterwards: a run makes thousands of stores."""
    directory.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(directory)


def sample(recorded: Recorded, count: int) -> list[Point]:
    """Crash points spread over a workload, and over the images."""
    rng = random.Random(f"{recorded.seed}/sample")
    chosen = sorted(rng.sample(recorded.points, min(count, len(recorded.points))))
    return [Point(recorded.seed, crash, image) for image, crash in enumerate(chosen)]


def main() -> None:
    """Repeat one point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in Point._fields:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--again", type=int, default=4, help="power cuts inside what follows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "root").mkdir()
        recorded = Recorded(directory / "root", arguments.workload)
        point = Point(arguments.workload, arguments.crash, arguments.image)
        crash(recorded, point, directory / "point", again=arguments.again)
    print("nothing is wrong at this point")  # noqa: T201


if __name__ == "__main__":
    main()
