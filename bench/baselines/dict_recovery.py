"""How long an index in Python dicts takes to come back from its snapshot: recovery.cpp's `directory` and `blocks`.

    python -m bench.baselines.dict_recovery KIND SNAPSHOT QUERY STARTED

The same files, the same questions, the same line of JSON. No strawman: columns are read by NumPy and stay there; only
what is looked up by key goes into a dict, which is filled inside the interpreter's C code, and no garbage is collected.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from bench.scale.process import report

ROW_BYTES: Final = 40
ROW_COUNT_AT: Final = 37
KEY_MASK: Final = 2**64 - 2**16
FIRST_SLOT: Final = 4096
Answers = Callable[[list[int], int], bool]


def directory(path: Path) -> Answers:
    """Routing key -> where its list is; lists and rows as columns."""
    with path.open("rb") as file:
        lists, postings, segments = np.fromfile(file, "<u8", 3).tolist()
        keys = np.fromfile(file, "<u8", lists)
        counts = np.fromfile(file, "<u4", lists)
        for _ in range(2):
            np.fromfile(file, "<u8", postings)
        slots = np.fromfile(file, "<u4", postings)
        rows = np.fromfile(file, "u1", segments * ROW_BYTES).reshape(segments, ROW_BYTES)
    begins = np.cumsum(counts, dtype=np.int64) - counts
    entries = dict(zip(keys.tolist(), zip(begins.tolist(), counts.tolist(), strict=True), strict=True))

    def answers(ids: list[int], slot: int) -> bool:
        for block_id in reversed(ids):
            found = entries.get(block_id & KEY_MASK)
            if found is not None:
                begin, count = found
                return bool((slots[begin : begin + count] == slot).any() and rows[slot - FIRST_SLOT, ROW_COUNT_AT])
        return False

    return answers


def blocks(path: Path) -> Answers:
    """Block ID -> who holds it."""
    with path.open("rb") as file:
        (count,) = np.fromfile(file, "<u8", 1).tolist()
        table = np.fromfile(file, "<u8", 3 * count).reshape(count, 3)
    entries = dict(zip(table[:, 0].tolist(), zip(table[:, 1].tolist(), table[:, 2].tolist(), strict=True), strict=True))
    return lambda ids, _: all(map(entries.__contains__, ids))


def main() -> None:
    """Load, ask, print."""
    main_ns = time.monotonic_ns()
    gc.disable()  # millions of new tuples would make it look for cycles again and again
    kind, snapshot, query, started = sys.argv[1:]
    question = np.fromfile(query, "<u8")
    answers = {"directory": directory, "blocks": blocks}[kind](Path(snapshot))
    ready = time.monotonic_ns()
    if not answers(question[2:].tolist(), int(question[1])):
        raise SystemExit("the query's sequence is not in the index")
    answered = time.monotonic_ns()
    print(report(started=int(started), opening=main_ns, ready=ready, answered=answered))


if __name__ == "__main__":
    main()
