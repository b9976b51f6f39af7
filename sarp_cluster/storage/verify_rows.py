"""Do the segments of a log hang together? The invariants S1 and S2 of the segment table, over all rows at once.

`SegmentTable.validate` says the same of a table in memory, with a dictionary a row; a store may have too many for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sarp_cluster.core.segment_table import SegmentTable

ROWS_A_STEP: Final = 65_536
FIELDS: Final = ("window", "namespace", "parent", "origin", "fork", "count")
Column = NDArray[np.uint32]


class BadRow(NamedTuple):
    """A segment that does not fit the others."""

    slot: int
    what: str


def bad_rows(table: SegmentTable, segment_blocks: int) -> Iterator[BadRow]:
    """Every segment whose parent or origin is not what it must be. 28 bytes a slot while it looks."""
    rows = {field: np.zeros(table.slots_end + 1, dtype=np.uint32) for field in FIELDS}
    for some in table.slots_in_use(ROWS_A_STEP):
        described = [row for slot in some if (row := table.describe(slot)) is not None]
        for field, column in rows.items():
            column[some] = [row[field] for row in described]
    for begin in range(0, table.slots_end, ROWS_A_STEP):
        slots = np.flatnonzero(rows["count"][begin : begin + ROWS_A_STEP]) + begin
        for what, bad in _faults(rows, slots, segment_blocks):
            for slot in slots[bad].tolist():
                yield BadRow(slot, what)


def _faults(
    rows: dict[str, Column], slots: NDArray[np.intp], segment_blocks: int
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """(what is wrong, which of these slots it is wrong with)."""
    window, namespace, fork = (rows[field][slots] for field in ("window", "namespace", "fork"))
    nowhere = len(rows["count"]) - 1  # a slot that no segment has
    for kind in ("parent", "origin"):
        has = rows[kind][slots] != 0
        there = np.minimum(rows[kind][slots], nowhere)
        missing = has & (rows["count"][there] == 0)
        yield f"its {kind} is not in the log", missing
        has &= ~missing
        yield f"its {kind} is of another namespace", has & (rows["namespace"][there] != namespace)
        if kind == "parent":
            yield "its parent is not of the window before", has & (rows["window"][there] + 1 != window)
            yield "its parent is not full", has & (rows["count"][there] != segment_blocks)
        else:
            yield "it has a fork without an origin, or the other way round", (rows[kind][slots] != 0) != (fork > 0)
            yield "its origin is of another window", has & (rows["window"][there] != window)
            outside = (rows["fork"][there] >= fork) | (fork > rows["count"][there])
            yield "its origin does not hold the block before the fork", has & (fork > 0) & outside
    yield "it has more blocks than a segment may", rows["count"][slots] > segment_blocks
