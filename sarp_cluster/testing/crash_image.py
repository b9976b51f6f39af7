"""What a disk could hold had the power failed at some step of a CrashFileSystem's record.

What was synced is certain. For the rest a file system that journals promises little, and disks reorder:

* Of each write that was not synced any sectors may be there, none, or zeros in their place; a later write may be there
  and an earlier one not. A sector is whole: it holds what the page cache held of it at some moment.
* Names that were made, changed or removed and not synced may be so or not, each directory entry for itself. A rename
  happens or does not; nothing happens to a name, or to a file, before what had happened to it earlier.

A seed chooses. Seed 0 takes nothing that was not synced, seed 1 all of it (a kill rather than a power cut, but for the
last write), the others something in between.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.testing.crash_file_system import (
    CrashFileSystem,
    FileNumber,
    Make,
    Operation,
    Rename,
    Sync,
    SyncDirectory,
    Truncate,
    Unlink,
    Write,
)

SECTOR_BYTES: Final = 512
Change = Write | Truncate
NameChange = Make | Rename | Unlink
Names = dict[str, FileNumber | None]
"""Files by path; None for a directory."""


class Survival(NamedTuple):
    """What the disk has of a change that was not synced: which of its sectors, and whether the file's new length."""

    sectors: Sequence[bool]
    length: bool


class _File:
    """Contents that are certain, and the changes behind them that are not all."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.changes: list[tuple[int, Change]] = []
        self.synced: set[int] = set()
        """Changes that are certain but lie behind one that is not."""
        self.dropped: set[int] = set()
        """Changes whose sync failed: no later one makes them certain."""

    def sync(self, covers: int, *, failed: bool) -> None:
        """All changes before `covers` become certain, or never will."""
        covered = {number for number, _ in self.changes if number < covers}
        if failed:
            self.dropped |= covered - self.synced
        else:
            self.synced |= covered - self.dropped
        while self.changes and self.changes[0][0] in self.synced:
            _, change = self.changes.pop(0)
            _apply(self.content, self.content, change, _all_of(change))

    def survivor(self, rng: random.Random, seed: int) -> bytes:
        """What a power cut leaves."""
        cached, kept = bytearray(self.content), bytearray(self.content)
        uncertain = [change for number, change in self.changes if number not in self.synced]
        chosen = iter(_choose(uncertain, rng, seed))
        for number, change in self.changes:
            _apply(cached, kept, change, _all_of(change) if number in self.synced else next(chosen))
        return bytes(kept)


def _sectors_of(change: Change) -> range:
    if isinstance(change, Truncate):
        return range(0)
    return range(change.offset // SECTOR_BYTES, -(-(change.offset + len(change.data)) // SECTOR_BYTES))


def _all_of(change: Change) -> Survival:
    return Survival([True] * len(_sectors_of(change)), True)


def _none_of(change: Change) -> Survival:
    return Survival([False] * len(_sectors_of(change)), False)


def _apply(cached: bytearray, kept: bytearray, change: Change, survival: Survival) -> None:
    """Change the page cache, and what the disk has of it."""
    if isinstance(change, Truncate):
        for content in (cached, kept) if survival.length else (cached,):
            del content[change.size :]
            content.extend(bytes(change.size - len(content)))
        return
    end = change.offset + len(change.data)
    cached.extend(bytes(max(0, end - len(cached))))
    cached[change.offset : end] = change.data
    if survival.length:
        kept.extend(bytes(max(0, end - len(kept))))
    for sector, there in zip(_sectors_of(change), survival.sectors, strict=True):
        if there:
            begin = sector * SECTOR_BYTES
            whole = cached[begin : begin + SECTOR_BYTES]
            kept.extend(bytes(max(0, begin - len(kept))))
            kept[begin : begin + len(whole)] = whole


def _choose(changes: list[Change], rng: random.Random, seed: int) -> list[Survival]:
    """What survives of the changes of one file, in one of the ways in which disks are known to lose something."""
    if seed == 0:
        return [_none_of(change) for change in changes]
    if seed == 1:
        return [*map(_all_of, changes[:-1]), *(_torn(change, rng) for change in changes[-1:])]
    way = rng.choice(("none", "all", "torn", "late", "reordered", "zeros"))
    turn = rng.randint(0, len(changes))
    survivors = []
    for i, change in enumerate(changes):
        if way == "all" or (way == "torn" and i < turn) or (way == "late" and i >= turn):
            survivors.append(_all_of(change))
        elif way == "torn" and i == turn:
            survivors.append(_torn(change, rng))
        elif way == "reordered":
            ways = (_all_of(change), _none_of(change), _torn(change, rng), _scattered(change, rng))
            survivors.append(rng.choice(ways))
        elif way == "zeros":
            survivors.append(Survival(_none_of(change).sectors, True) if rng.random() < 0.5 else _all_of(change))
        else:
            survivors.append(_none_of(change))
    return survivors


def _torn(change: Change, rng: random.Random) -> Survival:
    sectors = len(_sectors_of(change))
    there = rng.randint(0, sectors)
    return Survival([i < there for i in range(sectors)], there == sectors and rng.random() < 0.5)


def _scattered(change: Change, rng: random.Random) -> Survival:
    return Survival([rng.random() < 0.5 for _ in _sectors_of(change)], rng.random() < 0.5)


class _Names:
    """Names that are certain, and changes of names that are not."""

    def __init__(self, names: Names) -> None:
        self.certain = dict(names)
        self.changes: list[tuple[int, NameChange]] = []

    def sync(self, directory: str, covers: int) -> None:
        """What was changed in a directory before `covers` becomes certain."""
        left = []
        for number, change in self.changes:
            if number < covers and all(_parent(path) == directory for path in _paths_of(change)):
                _rename(self.certain, change)
            else:
                left.append((number, change))
        self.changes = left

    def survivors(self, rng: random.Random, seed: int) -> Names:
        """What a power cut leaves."""
        names = dict(self.certain)
        # One journal for all keeps their order; else each entry is for itself.
        way = ("none", "all")[seed] if seed < 2 else rng.choice(("none", "all", "journal", "each"))
        turn = rng.randint(0, len(self.changes))
        lost: set[str | FileNumber] = set()
        for i, (_, change) in enumerate(self.changes):
            touched: set[str | FileNumber] = set(_paths_of(change))
            if change.file is not None:
                touched.add(change.file)
            needed = touched | {_parent(path) for path in _paths_of(change)}
            kept = way == "all" or (way == "journal" and i < turn) or (way == "each" and rng.random() < 0.5)
            if kept and not needed & lost:
                _rename(names, change)
            else:
                lost |= touched
        return {path: file for path, file in names.items() if _has_parents(path, names)}


def _parent(path: str) -> str:
    return Path(path).parent.as_posix()


def _has_parents(path: str, names: Names) -> bool:
    return all(parent.as_posix() in names for parent in Path(path).parents if parent != Path("."))


def _paths_of(change: NameChange) -> Iterable[str]:
    return (change.source, change.target) if isinstance(change, Rename) else (change.path,)


def _rename(names: Names, change: NameChange) -> None:
    match change:
        case Make(path, file):
            names[path] = file
        case Rename(source, target, file):
            names.pop(source, None)
            names[target] = file
        case Unlink(path):
            names.pop(path, None)


def _play(record: CrashFileSystem, crash: int) -> tuple[_Names, dict[FileNumber, _File]]:
    """The record up to the operation with the number `crash`, which is under way: it may have happened, or a part."""
    names: Names = {}
    files: dict[FileNumber, _File] = {}
    for path, content in record.beginning.items():
        names[path] = None
        if content is not None:
            names[path] = len(files)
            files[len(files)] = _File(content)
    known = _Names(names)
    for number, operation in enumerate(record.operations[: crash + 1]):
        match operation:
            case Make() | Rename() | Unlink():
                known.changes.append((number, operation))
                if isinstance(operation, Make) and operation.file is not None:
                    files[operation.file] = _File()
            case Write() | Truncate():
                files[operation.file].changes.append((number, operation))
            case Sync(file, covers, failed):
                if number < crash:
                    files[file].sync(covers, failed=failed)
            case SyncDirectory(path, covers):
                if number < crash:
                    known.sync(path, covers)
    return known, files


def materialise(record: CrashFileSystem, crash: int, seed: int, target: Path) -> None:
    """Put into the new directory `target` what could be left had the power failed in operation `crash` of a record.

    `crash` may be the number of operations: all of them have ended. The same numbers give the same again.
    """
    rng = random.Random(f"{seed}/{crash}")  # not for secrets
    known, files = _play(record, crash)
    names = known.survivors(rng, seed)
    target.mkdir(mode=0o700)
    for path in sorted(names):
        file = names[path]
        if file is None:
            (target / path).mkdir(mode=0o700)
        else:
            (target / path).write_bytes(files[file].survivor(rng, seed))


def describe(operation: Operation) -> str:
    """An operation in one line, without its data."""
    if isinstance(operation, Write):
        return f"Write(file={operation.file}, offset={operation.offset}, {len(operation.data)} bytes)"
    return str(operation)
