"""The segment table: its counters, its slots and tags, and what validate() takes offence at."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import InvariantViolationError
from sarp_cluster.testing.core_access import allocate, load, release, remove, store
from sarp_cluster.testing.segments import make_unread_batch

FIRST_SLOT = 4096
SIZE = 4
ROW_BYTES = 40
PAGE_ROWS = 1024


def enter(table: SegmentTable, **fields: Any) -> int:
    """A new segment. `count` blocks; the rest as SegmentBatch.describe names it."""
    slot, tag = allocate(table)
    store(table, make_unread_batch([{"slot": slot, "tag": tag, "ids": [0] * fields.pop("count", SIZE), **fields}]))
    return slot


def change(table: SegmentTable, slot: int, **fields: Any) -> None:
    row = table.describe(slot)
    assert row is not None
    count = fields.pop("count", row["count"])
    store(table, make_unread_batch([row | fields | {"ids": [0] * count}]))


def children(table: SegmentTable, slot: int) -> int:
    row = table.describe(slot)
    assert row is not None
    return row["children"]


def test_a_new_table_is_empty() -> None:
    table = SegmentTable()
    assert (table.segments, table.blocks, table.block_entries, table.deltas) == (0, 0, 0, 0)
    assert table.slots_end == FIRST_SLOT
    assert table.describe(FIRST_SLOT) is None
    assert table.slots_with_delta(0, 100, 10) == ([], 0)
    table.validate(SIZE)


def test_describe_gives_back_what_was_stored() -> None:
    table = SegmentTable()
    parent = enter(table, window=2, namespace=3)
    origin = enter(table, window=3, namespace=3, parent=parent)
    fields = {
        "window": 3,
        "namespace": 3,
        "parent": parent,
        "origin": origin,
        "fork": 2,
        "image": 2**63 + 5,
        "delta": 9,
    }
    slot = enter(table, count=3, **fields)
    assert table.describe(slot) == fields | {"slot": slot, "tag": 0, "children": 0, "count": 3}
    assert (children(table, parent), children(table, origin)) == (2, 1)
    (loaded,) = load(table, [slot]).describe()
    assert {name: loaded[name] for name in fields} == fields
    assert (loaded["count"], loaded["image_count"], loaded["state"]) == (3, 0, 0)
    table.validate(SIZE)


@pytest.mark.parametrize("slot", [0, 1, FIRST_SLOT - 1, FIRST_SLOT + 1, 2**31, 2**32 - 1])
def test_a_slot_that_was_never_used_describes_as_none(slot: int) -> None:
    table = SegmentTable()
    enter(table)
    assert table.describe(slot) is None


def test_blocks_count_at_home_and_entries_with_copies() -> None:
    table = SegmentTable()
    origin = enter(table, count=4)
    enter(table, count=3, origin=origin, fork=2)
    assert (table.segments, table.blocks, table.block_entries) == (2, 5, 7)
    table.validate(SIZE)


def test_a_change_of_state_moves_the_counters() -> None:
    table = SegmentTable()
    slot = enter(table, count=2, image=8)
    version = table.version
    change(table, slot, count=3, delta=16)
    assert (table.segments, table.blocks, table.block_entries, table.deltas) == (1, 3, 3, 1)
    change(table, slot, delta=24)
    assert table.deltas == 1
    change(table, slot, image=32, delta=0)
    assert table.deltas == 0
    assert table.version == version + 3
    table.validate(SIZE)


def test_a_freed_slot_is_used_again_under_a_new_tag() -> None:
    table = SegmentTable()
    first, second = enter(table, delta=8), enter(table)
    remove(table, first)
    assert table.describe(first) is None
    assert (table.segments, table.blocks, table.deltas) == (1, SIZE, 0)
    assert allocate(table) == (first, 1)
    release(table, first)
    assert allocate(table) == (first, 2)
    assert allocate(table) == (second + 1, 0)
    table.validate(SIZE)


def test_removal_goes_from_leaf_to_root() -> None:
    table = SegmentTable()
    root = enter(table)
    child = enter(table, window=1, parent=root)
    copy = enter(table, origin=root, fork=1)
    with pytest.raises(InvariantViolationError, match="2 children"):
        remove(table, root)
    remove(table, child)
    remove(table, copy)
    remove(table, root)
    with pytest.raises(InvariantViolationError, match="free"):
        remove(table, root)
    assert (table.segments, table.blocks, table.block_entries) == (0, 0, 0)
    table.validate(SIZE)


def test_growing_never_moves_a_row_and_costs_41_bytes_each() -> None:
    table = SegmentTable()
    rows = 5 * PAGE_ROWS + 3
    slots = [enter(table, image=8 * number) for number in range(1, rows + 1)]
    assert slots == list(range(FIRST_SLOT, FIRST_SLOT + rows))
    for number in (1, PAGE_ROWS, PAGE_ROWS + 1, rows):
        row = table.describe(FIRST_SLOT + number - 1)
        assert row is not None
        assert row["image"] == 8 * number
    # Beside the rows: what there is a page, 398 bytes, for at most twice the pages or 16.
    assert 0 <= table.resident_bytes - 6 * PAGE_ROWS * ROW_BYTES <= 16 * 400
    table.validate(SIZE)


def test_slots_with_delta_are_found_in_bounded_steps() -> None:
    table = SegmentTable()
    wanted = [enter(table, delta=8 if number % 7 == 0 else 0) for number in range(2_000)][::7]
    removed = wanted.pop(3)
    remove(table, removed)
    for rows, limit in ((100, 1_000), (5_000, 13), (1, 1), (2**32 - 1, 10_000)):
        found, hand, steps = [], 0, 0
        while steps == 0 or hand:
            slots, hand = table.slots_with_delta(hand, rows, limit)
            assert len(slots) <= limit
            found += slots
            steps += 1
        assert found == wanted
    assert table.slots_with_delta(2**32 - 1, 100, 100) == ([], 0)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("S1", {"window": 2}),
        ("S1", {"namespace": 2}),
        ("S1", {"parent": FIRST_SLOT + 2}),  # not full
        ("S1", {"parent": FIRST_SLOT + 99}),  # not there
        ("S2", {"parent": 0, "fork": 1}),
        ("S2", {"parent": 0, "origin": FIRST_SLOT + 1}),
        ("S2", {"origin": FIRST_SLOT, "fork": 1}),  # of another window
        ("S2", {"origin": FIRST_SLOT + 2, "fork": 3}),  # shorter than the fork
        ("S2", {"origin": FIRST_SLOT + 99, "fork": 1}),
    ],
)
def test_validate_finds_what_does_not_hang_together(rule: str, broken: dict[str, int]) -> None:
    table = SegmentTable()
    root = enter(table)
    sound = {"window": 1, "parent": root}
    enter(table, **sound)
    enter(table, **sound, count=2)
    for _ in range(200):
        allocate(table)
    table.validate(SIZE)
    enter(table, **sound | broken)
    with pytest.raises(InvariantViolationError, match=rule):
        table.validate(SIZE)


def test_validate_finds_a_parent_that_changed_behind_its_childs_back() -> None:
    table = SegmentTable()
    root = enter(table)
    leaf = enter(table, window=1, parent=root)
    other = enter(table)
    change(table, leaf, parent=other)  # a segment's parent never changes; `store` does not count it again
    with pytest.raises(InvariantViolationError, match="S3"):
        table.validate(SIZE)


@pytest.mark.parametrize("seed", range(3))
def test_counters_stay_exact(seed: int) -> None:
    rng = random.Random(seed)
    table = SegmentTable()
    rows: dict[int, dict[str, int]] = {}
    tags: dict[int, int] = {}
    for step in range(1_000):
        choice = rng.random()
        named = {row[name] for row in rows.values() for name in ("parent", "origin")}
        leaves = [slot for slot in rows if slot not in named]
        if choice < 0.3 and leaves:
            slot = rng.choice(leaves)
            remove(table, slot)
            del rows[slot]
        elif choice < 0.5 and rows:
            slot = rng.choice(list(rows))
            rows[slot]["count"] = rng.randint(rows[slot]["count"], SIZE)
            rows[slot]["delta"] = rng.choice((0, 8))
            change(table, slot, count=rows[slot]["count"], delta=rows[slot]["delta"])
        else:
            full = [slot for slot in rows if rows[slot]["count"] == SIZE]
            fields = {"window": 0, "parent": 0, "origin": 0, "fork": 0, "delta": rng.choice((0, 8))}
            shared = [slot for slot in rows if rows[slot]["fork"] < rows[slot]["count"]]
            if shared and rng.random() < 0.4:
                origin = rng.choice(shared)
                fields |= {"window": rows[origin]["window"], "parent": rows[origin]["parent"], "origin": origin}
                fields["fork"] = rng.randint(rows[origin]["fork"] + 1, rows[origin]["count"])
            elif full and rng.random() < 0.7:
                parent = rng.choice(full)
                fields |= {"window": rows[parent]["window"] + 1, "parent": parent}
            count = rng.randint(min(SIZE, fields["fork"] + 1), SIZE)
            slot = enter(table, count=count, **fields)
            rows[slot] = fields | {"count": count}
            row = table.describe(slot)
            assert row is not None
            assert row["tag"] == tags.get(slot, -1) + 1
            tags[slot] = row["tag"]
        assert table.segments == len(rows)
        assert table.blocks == sum(row["count"] - row["fork"] for row in rows.values())
        assert table.block_entries == sum(row["count"] for row in rows.values())
        assert table.deltas == sum(row["delta"] != 0 for row in rows.values())
        if step % 100 == 0:
            table.validate(SIZE)
    table.validate(SIZE)
