"""Segments that cannot be read: taken out, or cut to what a copy of them still says.

What such a segment held is lost. While others depend on it, it must not just go:

* nothing depends on it: it is taken out. Its blocks are stored again by whoever has them, as if they were new;
* only copies depend on it, as their origin: they have its first blocks, verified. It is written anew with as many as
  the longest copy has, under its own slot, held by nobody. A copy that cannot be read either is repaired first;
* a segment of the next window depends on it: nothing here tells its last blocks. An insert that goes on behind it does,
  since block IDs are chained, and heals it (core.matching).

Where it was registered is not known: core.removal.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sarp_cluster.core.removal import Dependents, commit_cut, dependents, drop, plan_cut
from sarp_cluster.storage.run_file import FIRST_SLOT, PAGE_ROWS
from shard.state import IndexState

ROWS_A_STEP: Final = 65_536
"""Rows of the segment table that are looked through at once: some 0.1 ms."""

ATTEMPTS_MAX: Final = 8

READ: Final = 1
"""State of a segment whose records verified."""


async def repair(state: IndexState, slot: int) -> bool:
    """See to it that this segment can be read, or is gone. False: others depend on it, and it stays as it is."""
    async with state.repairing:
        return await _repair(state, slot)


async def _repair(state: IndexState, slot: int) -> bool:
    chain = [slot]  # a segment, a copy of it that cannot be read either, a copy of that: forks grow, so it ends
    for _ in range(ATTEMPTS_MAX * state.config.segment_blocks):
        if not chain:
            return True
        if await _is_sound(state, chain[-1]):
            chain.pop()
            continue
        row = state.table.describe(chain[-1])
        if row is None:
            continue
        if row["children"] == 0:
            state.store.put_removal(row)
            drop(state.table, row["slot"])
            state.healed += 1
            state.store.put_lost(row["image"], row["delta"])
            continue
        found = await _dependents(state, row)
        if found is None:
            continue
        if found.children or state.loader.unloaded:
            return False
        if not await _cut(state, row, found):
            chain.append(found.copy)
    return False


async def _is_sound(state: IndexState, slot: int) -> bool:
    """Is there no such segment, or can it be read? Rows of it, its parent and its origin are in memory from then on."""
    table, search = state.table, state.search()
    await state.loader.load_pages([_page(slot)])
    row = table.describe(slot)
    if row is None:
        state.idle_searches.append(search)
        return True
    await state.loader.load_pages(sorted({_page(row[name]) for name in ("parent", "origin") if row[name]}))
    search.load_segments([slot])
    await state.wait_for(search.batch)
    (read,) = search.batch.describe()
    state.idle_searches.append(search)
    return bool(read["state"] == READ) or not _is_still(table.describe(slot), read)


def _page(slot: int) -> int:
    return (slot - FIRST_SLOT) // PAGE_ROWS


def _is_still(row: dict[str, int] | None, read: dict[str, Any]) -> bool:
    """Is a segment as it was when it was read?"""
    return row is not None and all(row[name] == read[name] for name in ("tag", "image", "delta"))


async def _dependents(state: IndexState, row: dict[str, int]) -> Dependents | None:
    """What depends on a segment; None: that changed while it was counted."""
    found, begin = Dependents(0, 0, 0, 0), FIRST_SLOT
    while begin and not state.loader.unloaded:
        found, begin = dependents(state.table, row["slot"], begin, ROWS_A_STEP, found)
        await asyncio.sleep(0)
    if state.table.describe(row["slot"]) != row:
        return None
    return found if found.children + found.copies == row["children"] or state.loader.unloaded else None


async def _cut(state: IndexState, row: dict[str, int], found: Dependents) -> bool:
    """Write a segment anew with the blocks that its longest copy has. False: that cannot be read.

    No copy of it is taken out meanwhile, by whoever else repairs: where it has as many as before it has the same.
    """
    insertion = state.insertion()
    search, writes = insertion.search, insertion.writes
    search.load_segments([found.copy])
    await state.wait_for(search.batch)
    (copy,) = search.batch.describe()
    sound = bool(copy["state"] == READ)
    if sound and state.table.describe(row["slot"]) == row and _is_still(state.table.describe(found.copy), copy):
        plan_cut(state.table, writes, row["slot"], search.batch, found.fork)
        state.store.put(writes)
        commit_cut(state.table, state.points, writes)
        state.healed += 1
        state.store.put_lost(row["image"], row["delta"])
    state.idle_insertions.append(insertion)
    return sound
