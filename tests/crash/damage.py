"""A small store with one damage in it, and what may come of that.

Allowed: the answers of the whole store; those of an earlier moment, or shorter ones; a refusal that names what is
damaged. Never another answer, and never another exception. A store that opens must also take what is new, and `verify`
must tell of what opening it does not. What is damaged of a snapshot the log has, too: opened once more, or twice, the
store answers from that.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import BadRequestError, CorruptRecordError, SarpError, SnapshotDamagedError, StorageError
from sarp_cluster.storage.record import read_frame
from sarp_cluster.storage.store_directory import LOCK_NAME, LOG_NAME
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.reference_index import Answer, chained_block_ids
from sarp_cluster.types import Worker
from shard.index import Index
from tests.crash.crash_points import told
from tests.crash.virtual_time import run
from tests.golden.store_directory import INSERTS, SPECS, STEM, WORKERS, Insert, reference, write_store

PAGE_BYTES: Final = 4_096
FRAME_BYTES: Final = 32
SNAPSHOTS_MAX: Final = 3
ZEROS_EVERY: Final = 61
"""Runs are padded to whole chunks."""
SAME, SHORTER, REFUSED = "same", "shorter", "refused"
GENERATIONS: Final = (0, 1, 3)
"""Of the golden store's workers, at its end."""
HISTORY: Final = (
    *INSERTS,
    *(
        Insert(n % 2, (*STEM[: 2 * n], *range(200 * n, 200 * n + 25)), WORKERS[n % 3], GENERATIONS[n % 3], handle=n)
        for n in range(25)
    ),
    Insert(0, (*STEM, 31), WORKERS[2], generation=4),  # ends what it held before
)
SEQUENCES: Final = sorted({(one.namespace, one.tokens) for one in HISTORY})


class Damage(NamedTuple):
    """Something that happens to the files of a store."""

    what: str
    do: Callable[[Path], object]
    shows: bool = True
    """Can it be seen from what is left? The end of the last file cannot be missed."""


class Original:
    """An undamaged store, and what it answered after each of its inserts."""

    def __init__(self, directory: Path, config: IndexConfig, snapshots_after: Sequence[int] = ()) -> None:
        self.directory = directory
        self.config = config
        run(lambda: write_store(directory, config, secret=None, inserts=HISTORY, snapshots_after=snapshots_after))
        self.moments = [_reference_answers(HISTORY[:count]) for count in range(len(HISTORY), -1, -1)]
        """The latest first."""

    def files(self) -> list[Path]:
        """All files that hold anything, of whatever kind."""
        return sorted(path for path in self.directory.iterdir() if path.name != LOCK_NAME)

    def logs(self) -> list[Path]:
        """The log files in order."""
        return [path for path in self.files() if LOG_NAME.fullmatch(path.name)]

    def outcome(self, damage: Damage, store: Path) -> str:
        """What becomes of a copy with a damage in it. Raises AssertionError if that may not be."""
        with told(f"damage: {damage.what}"):
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(self.directory, store)
            damage.do(store)
            tells = not _is_verified(store)
            try:
                answers = self._answers(store)
            except (StorageError, BadRequestError) as error:
                _check_refusal(error, store)
                return REFUSED
            if answers == self.moments[0]:
                return SAME
            assert any(_is_part(answers, moment) for moment in self.moments), "it answers what it never did"
            assert tells or not damage.shows, "verify finds nothing, and the answers are shorter"
            return SHORTER

    def _answers(self, store: Path) -> list[Answer]:
        """The store's answers; where a snapshot is damaged, those of the one before, or of the log."""
        for _ in range(SNAPSHOTS_MAX):
            try:
                return run(lambda: self._open(store))
            except SnapshotDamagedError as error:
                _check_refusal(error, store)
        raise AssertionError("it is opened from the same damaged snapshot again and again")

    async def _open(self, store: Path) -> list[Answer]:
        index = await Index.open(store, self.config)
        try:
            namespaces = [index.create_namespace(spec) for spec in SPECS]
            answers = [
                Answer.of(await index.match(namespaces[number], chained_block_ids(tokens), detail="blocks"))
                for number, tokens in SEQUENCES
            ]
            fresh = chained_block_ids(range(10**6, 10**6 + 20))
            await index.insert(namespaces[0], fresh, worker=Worker("fresh"))
            assert (await index.match(namespaces[0], fresh)).matched_blocks == 20
            await index.load_all()
            return answers
        except SnapshotDamagedError:
            await asyncio.sleep(1)  # of virtual time: until the index has found out by itself, too
            raise
        finally:
            await index.close()


def _reference_answers(inserts: Sequence[Insert]) -> list[Answer]:
    index = reference(inserts)
    namespaces = [index.create_namespace(spec) for spec in SPECS]
    return [index.match(namespaces[number], chained_block_ids(tokens), detail="blocks") for number, tokens in SEQUENCES]


def _is_part(answers: list[Answer], whole: list[Answer]) -> bool:
    """Is each answer that of the whole store at some moment, or shorter?"""
    for got, wanted in zip(answers, whole, strict=True):
        blocks, wanted_blocks = got.blocks or [], wanted.blocks or []
        if got.verified_blocks > wanted.verified_blocks or blocks != wanted_blocks[: len(blocks)]:
            return False
    return True


def _is_verified(store: Path) -> bool:
    try:
        return not verify(store).findings
    except SarpError:
        return False


def _check_refusal(error: Exception, store: Path) -> None:
    if isinstance(error, BadRequestError):
        assert error.field == "secret", error
    else:
        assert store.name in str(error), error
    if isinstance(error, CorruptRecordError):
        assert "offset" in str(error) or "is missing" in str(error) or not LOG_NAME.search(str(error)), error


def records(path: Path) -> list[tuple[int, int]]:
    """(begin, end) of the records of a log file; none in a file of another kind."""
    match = LOG_NAME.fullmatch(path.name)
    found: list[tuple[int, int]] = []
    data, at = path.read_bytes(), 0
    while match and at < len(data):
        header = read_frame(data, at, int(match[1]), at)
        assert header is not None
        end = at + (FRAME_BYTES + header.payload_bytes + 7) // 8 * 8
        found.append((at, end))
        at = end
    return found


# --- kinds of damage --------------------------------------------------------------------------------------------------


def _changed(path: Path, change: Callable[[bytearray], object]) -> Callable[[Path], object]:
    """Changes the bytes of the file of that name in another store."""

    def do(store: Path) -> None:
        data = bytearray((store / path.name).read_bytes())
        change(data)
        (store / path.name).write_bytes(data)

    return do


def flips(path: Path) -> Iterator[Damage]:
    """Each byte of a file, with one bit flipped; of long stretches of zeros only some."""
    rng = random.Random(path.name)
    data = path.read_bytes()
    for at in range(len(data)):
        if at % ZEROS_EVERY and not any(data[max(0, at - 8) : at + 9]):
            continue
        bit = 1 << rng.randrange(8)

        def flip(data: bytearray, at: int = at, bit: int = bit) -> None:
            data[at] ^= bit

        yield Damage(f"{path.name}: bit {bit} of byte {at} is flipped", _changed(path, flip))


def truncations(path: Path, *, is_last: bool) -> Iterator[Damage]:
    """A file cut off: at each length of its last two records first, then at every other."""
    lengths = range(path.stat().st_size - 1, -1, -1)
    for length in lengths:

        def cut(data: bytearray, length: int = length) -> None:
            del data[length:]

        yield Damage(f"{path.name} is cut off at {length}", _changed(path, cut), shows=not is_last)


def deletions(original: Original) -> Iterator[Damage]:
    """A file is gone."""
    for path in original.files():

        def delete(store: Path, name: str = path.name) -> None:
            (store / name).unlink()

        yield Damage(f"{path.name} is gone", delete, shows=path != original.logs()[-1])


def swaps(files: list[Path]) -> Iterator[Damage]:
    """Two files have each other's name."""
    for i, first in enumerate(files):
        for second in files[i + 1 :]:

            def swap(store: Path, one: str = first.name, other: str = second.name) -> None:
                (store / one).rename(store / "between")
                (store / other).rename(store / one)
                (store / "between").rename(store / other)

            yield Damage(f"{first.name} and {second.name} are swapped", swap)


def pages(path: Path) -> Iterator[Damage]:
    """A page of a file is zeros, or what stands in another page of it."""
    size = path.stat().st_size
    for at in range(0, size, PAGE_BYTES):
        end = min(at + PAGE_BYTES, size)

        def clear(data: bytearray, at: int = at, end: int = end) -> None:
            data[at:end] = bytes(end - at)

        yield Damage(f"{path.name}: the page at {at} is zeros", _changed(path, clear))
        for other in range(0, size - (end - at) + 1, PAGE_BYTES):
            if other != at:

                def copy(data: bytearray, at: int = at, end: int = end, other: int = other) -> None:
                    data[at:end] = data[other : other + end - at]

                yield Damage(f"{path.name}: the page at {at} is that at {other}", _changed(path, copy))


def record_swaps(path: Path) -> Iterator[Damage]:
    """Two records of a log file have changed places; those between them have moved."""
    found = records(path)
    for i, (begin, end) in enumerate(found):
        for begin_other, end_other in found[i + 1 :]:

            def swap(
                data: bytearray, begin: int = begin, end: int = end, first: int = begin_other, last: int = end_other
            ) -> None:
                data[begin:last] = data[first:last] + data[end:first] + data[begin:end]

            yield Damage(f"{path.name}: the records at {begin} and {begin_other} are swapped", _changed(path, swap))
