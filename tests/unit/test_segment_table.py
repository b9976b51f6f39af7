"""The segment table: its counters, its slots and tags, and what validate() takes offence at."""

from __future__ import annotations

import random
import struct
from array import array
from typing import Any

import pytest

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, InvariantViolationError
from sarp_cluster.testing.core_access import (
    allocate,
    load,
    release,
    remove,
    replay_deltas,
    replay_images,
    replay_removals,
    row,
    store,
)
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
    assert table.slots_from(0, 100, 10, with_delta=True) == ([], 0)
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
            slots, hand = table.slots_from(hand, rows, limit, with_delta=True)
            assert len(slots) <= limit
            found += slots
            steps += 1
        assert found == wanted
    assert table.slots_from(2**32 - 1, 100, 100, with_delta=True) == ([], 0)


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


# --- loading page by page (property tests: test_lazy_segment_table.py) ------------------------------------------------


def packed(**fields: int) -> bytes:
    """A row of a snapshot."""
    names = (
        "image",
        "delta",
        "parent",
        "origin",
        "children",
        "namespace",
        "window",
        "tag",
        "fork",
        "count",
        "stale",
    )
    return struct.pack("<QQIIIIHHBBH", *(fields.get(name, 1 if name == "namespace" else 0) for name in names))


def lazy(pages: int = 3, segments: int = 3, deltas: int = 0) -> SegmentTable:
    """A table of which nothing is loaded."""
    table = SegmentTable()
    table.begin_lazy(FIRST_SLOT + pages * PAGE_ROWS, segments, segments * SIZE, segments * SIZE, deltas)
    return table


def first_slot(page: int) -> int:
    return FIRST_SLOT + page * PAGE_ROWS


def install(table: SegmentTable, page: int, **rows_by_index: bytes) -> None:
    """Load a page with rows named r0, r7 and so on by where they stand in it."""
    slots = array("I", [first_slot(page) + int(name[1:]) for name in rows_by_index])
    table.install_page(page, slots, b"".join(rows_by_index.values()))


def record(slot: int, **fields: Any) -> Any:
    return make_unread_batch([{"slot": slot, "ids": [0] * fields.pop("count", SIZE), **fields}])


def test_what_is_not_loaded_reads_as_zero_and_is_noted_once() -> None:
    table = lazy()
    assert (table.unloaded_pages, table.missed_count, table.next_unloaded(0)) == (3, 0, 0)
    for slot in (first_slot(1), first_slot(1) + 5, first_slot(0)):
        assert row(table, slot) is None
        (loaded,) = load(table, [slot]).describe()
        assert (loaded["count"], loaded["image"], loaded["parent"]) == (0, 0, 0)
    assert table.missed_pages() == [1, 0]
    assert table.missed_count == 2
    install(table, 1, r5=packed(image=8, count=SIZE))
    assert table.missed_pages() == [0]
    table.clear_missed()
    assert row(table, first_slot(1) + 5) == packed(image=8, count=SIZE)
    assert table.missed_count == 0
    for page in (0, 1, 7):  # not loaded; loaded; not there
        table.want_page(page)
    assert table.missed_pages() == [0]
    assert [table.next_unloaded(page) for page in range(4)] == [0, 2, 2, -1]


def test_more_pages_than_fit_are_missed_in_turns() -> None:
    table = lazy(pages=100)
    missed: set[int] = set()
    while table.unloaded_pages:
        table.clear_missed()
        for page in range(100):
            row(table, first_slot(page))
        assert 0 < table.missed_count <= 64
        for page in table.missed_pages():
            install(table, page)
            missed.add(page)
    assert missed == set(range(100))


def test_what_needs_every_page_says_so() -> None:
    table = lazy()
    with pytest.raises(InvariantViolationError, match="3 pages"):
        table.validate(SIZE)
    with pytest.raises(InvariantViolationError, match="page 2"):
        table.describe(first_slot(2))
    with pytest.raises(InvariantViolationError, match="page 0"):
        list(table.slots_in_use(10))
    assert table.slots_from(0, 10_000, 10, with_delta=True) == ([], 0)
    table.validate_lists()
    assert table.missed_count == 0


def test_a_parent_that_is_not_loaded_takes_no_child() -> None:
    table = lazy(pages=1, segments=1)
    table.finish_replay()
    slot, _ = allocate(table)
    assert slot == first_slot(1)
    for name in ("parent", "origin"):
        with pytest.raises(InvariantViolationError, match="page 0 of the segment table is not loaded"):
            store(table, record(slot, fork=1, **{name: first_slot(0)}))
    assert (table.segments, table.dirty_rows) == (1, 0)
    install(table, 0, r0=packed(image=8, count=SIZE))
    store(table, record(slot, window=1, parent=first_slot(0)))
    table.validate(SIZE)


def test_slots_are_handed_out_from_the_next_page_until_one_is_loaded() -> None:
    table = SegmentTable()
    table.begin_lazy(FIRST_SLOT + PAGE_ROWS + 10, 1, SIZE, SIZE, 0)
    table.finish_replay()
    assert allocate(table) == (first_slot(2), 0)
    install(table, 1, r0=packed(image=8, count=SIZE, tag=3), r2=packed(tag=7))
    assert [allocate(table) for _ in range(3)] == [
        (first_slot(1) + 1, 1),
        (first_slot(1) + 2, 8),
        (first_slot(1) + 3, 1),
    ]
    table.validate_lists()
    whole = SegmentTable()
    whole.begin_lazy(FIRST_SLOT + PAGE_ROWS + 10, 0, 0, 0, 0)
    install(whole, 0)
    install(whole, 1)
    whole.finish_replay()
    assert [allocate(whole)[0] for _ in range(PAGE_ROWS + 12)] == list(range(FIRST_SLOT, FIRST_SLOT + PAGE_ROWS + 12))


def test_the_log_behind_the_snapshot_waits_for_the_page() -> None:
    """A row, a delta, a child and a removal of rows that are not loaded; records that are dead are told."""
    table = lazy(pages=2, segments=3, deltas=1)
    old, parent, leaf = first_slot(0), first_slot(0) + 1, first_slot(0) + 2
    new = first_slot(2)
    assert replay_images(table, record(old, image=800, count_before=2), had_delta=True)
    assert replay_deltas(table, record(parent, delta=808, count_before=3))
    assert replay_images(table, record(new, image=816, window=1, parent=parent))
    assert replay_removals(table, record(leaf, parent=parent))
    assert (table.segments, table.deltas) == (3, 1)
    assert (table.pages_with_patches(), table.patched_pages, table.dirty_rows) == ([0], 1, 1)
    table.finish_replay()
    with pytest.raises(InvariantViolationError, match="1 pages that changed"):
        table.freeze()
    install(
        table,
        0,
        r0=packed(image=8, delta=16, count=2, children=2),
        r1=packed(image=24, count=3, children=1),
        r2=packed(image=32, count=SIZE, parent=parent, tag=0),
    )
    assert row(table, old) == packed(image=800, count=SIZE, children=2)
    assert row(table, parent) == packed(image=24, delta=808, count=SIZE, children=1)
    assert table.describe(leaf) is None
    assert list(table.take_replaced()) == [8, 16, 32]
    assert list(table.take_replaced()) == []
    assert (table.patched_pages, table.dirty_rows, table.unloaded_pages) == (0, 4, 1)
    assert allocate(table) == (first_slot(0) + 2, 1)
    assert table.freeze() == 4


def test_records_that_make_no_sense_behind_a_snapshot() -> None:
    table = lazy(pages=1, segments=1)
    install(table, 0, r0=packed(image=8, count=2, tag=5), r1=packed(image=16, count=SIZE, children=1, delta=24))
    slot = first_slot(0)
    counted = (table.segments, table.blocks, table.block_entries, table.deltas, table.version)
    for batch, had_delta in (
        (record(slot, tag=5, count=3), False),  # not new
        (record(slot, tag=4, count=3, count_before=2), False),
        (record(slot, tag=5, count=3, count_before=1), False),
        (record(slot, tag=5, count=3, count_before=2), True),
        (record(slot + 9, parent=slot + PAGE_ROWS), False),  # not there
        (record(slot + 9, origin=7), False),
        (record(slot + 9, parent=slot + 9), False),
        (record(slot + 200_000), False),  # nobody can have taken it
        (record(7), False),
    ):
        assert not replay_images(table, batch, had_delta)
        if batch.describe()[0]["slot"] == slot:
            assert not replay_deltas(table, batch, had_delta)
    assert not replay_deltas(table, record(slot, tag=5, count_before=2, namespace=9))
    assert not replay_deltas(table, record(slot + PAGE_ROWS, count_before=2))
    assert not replay_removals(table, record(slot + 1, delta=24))  # it has a child
    assert not replay_removals(table, record(slot, tag=5))
    assert counted == (table.segments, table.blocks, table.block_entries, table.deltas, table.version)
    assert table.dirty_rows == 0


@pytest.mark.parametrize(
    "rows",
    [
        {"r0": packed(count=65)},
        {"r0": packed(count=2, fork=3)},
        {"r0": packed(count=2, stale=2)},
        {"r0": packed(count=2, parent=7)},
        {"r0": packed(count=2, origin=2**31)},
        {"r0": packed(count=2, parent=FIRST_SLOT)},
        {"r1": packed(count=2), "r0": packed(count=2)},
        {"r0": packed(count=2), "r00": packed(count=2)},
        {"r1024": packed(count=2)},
    ],
)
def test_rows_of_a_snapshot_that_make_no_sense_are_refused(rows: dict[str, bytes]) -> None:
    table = lazy()
    with pytest.raises(CorruptRecordError):
        install(table, 0, **rows)
    assert table.unloaded_pages == 3
    install(table, 0)


@pytest.mark.parametrize(
    "rows", [{}, {"r0": packed(count=1)}, {"r0": packed(count=2, tag=1)}, {"r0": packed(count=2, delta=8)}]
)
def test_a_page_that_the_log_does_not_fit_is_refused(rows: dict[str, bytes]) -> None:
    table = lazy()
    replay_images(table, record(first_slot(0), image=8, count_before=2))
    with pytest.raises(CorruptRecordError, match=f"segment {FIRST_SLOT}: the log"):
        install(table, 0, **rows)
    assert (table.unloaded_pages, table.pages_with_patches()) == (3, [0])
    assert list(table.take_replaced()) == []
    install(table, 0, r0=packed(count=2, image=16))


def test_pages_cost_their_memory_when_they_are_loaded() -> None:
    table = lazy(pages=64)
    assert table.resident_bytes < 64 * 500
    install(table, 3)
    assert table.resident_bytes > PAGE_ROWS * ROW_BYTES


def test_only_an_empty_table_begins_lazily() -> None:
    table = SegmentTable()
    enter(table)
    with pytest.raises(InvariantViolationError):
        table.begin_lazy(FIRST_SLOT, 0, 0, 0, 0)
    for next_slot in (0, FIRST_SLOT - 1, 2**31 + 1):
        with pytest.raises(CorruptRecordError):
            SegmentTable().begin_lazy(next_slot, 0, 0, 0, 0)
    table = SegmentTable()
    table.begin_lazy(FIRST_SLOT, 0, 0, 0, 0)
    table.finish_replay()
    with pytest.raises(InvariantViolationError):
        table.finish_replay()
    assert allocate(table) == (FIRST_SLOT, 0)


# --- snapshots --------------------------------------------------------------------------------------------------------


def frozen_images(table: SegmentTable) -> dict[int, int]:
    slots, rows = table.take_frozen()
    return {slot: int.from_bytes(rows[ROW_BYTES * at : ROW_BYTES * at + 8], "little") for at, slot in enumerate(slots)}


def test_a_freeze_has_what_changed_since_the_last_one_as_it_was() -> None:
    table = SegmentTable()
    slots = [enter(table, image=8 * number) for number in range(1, 3_001)]
    assert (table.dirty_rows, table.freeze(), table.dirty_rows) == (3_000, 3_000, 0)
    left = 3_000
    for slot in reversed(slots):  # against the order in which they are copied
        change(table, slot, image=8_000_008)
        left = table.copy_frozen(3)
        table.validate_lists()
        if left == 0:
            break
    assert left == 0
    assert frozen_images(table) == {slot: 8 * number for number, slot in enumerate(slots, 1)}
    table.release_frozen()
    changed = table.dirty_rows
    assert 700 < changed < 3_000
    assert table.freeze() == changed
    while table.copy_frozen(100):
        pass
    assert set(frozen_images(table).values()) == {8_000_008}


def test_the_steps_of_a_snapshot_have_an_order() -> None:
    table = SegmentTable()
    for step in (lambda: table.copy_frozen(1), table.take_frozen, table.release_frozen, table.thaw):
        with pytest.raises(InvariantViolationError):
            step()
    enter(table)
    assert table.freeze() == 1
    for step in (table.freeze, table.take_frozen, table.release_frozen):
        with pytest.raises(InvariantViolationError):
            step()
    assert table.copy_frozen(0) == 1
    assert table.copy_frozen(1) == 0
    assert table.copy_frozen(1) == 0
    table.take_frozen()
    with pytest.raises(InvariantViolationError):
        table.freeze()
    table.release_frozen()
    assert (table.freeze(), table.copy_frozen(1)) == (0, 0)
    assert [bytes(column) for column in table.take_frozen()] == [b"", b""]


def test_a_snapshot_that_failed_leaves_its_rows_to_the_next() -> None:
    table = SegmentTable()
    slots = [enter(table, image=8 * number) for number in range(1, 11)]
    for copied in (0, 4, 10):
        table.freeze()
        table.copy_frozen(copied)
        change(table, slots[5], image=800)
        table.thaw()
        table.validate_lists()
        assert table.dirty_rows == 10
    table.freeze()
    table.copy_frozen(10)
    assert frozen_images(table) == {
        slot: 800 if slot == slots[5] else slot_image for slot, slot_image in zip(slots, range(8, 88, 8), strict=True)
    }


def test_what_was_taken_outlives_the_table() -> None:
    table = SegmentTable()
    slot = enter(table, image=8)
    table.freeze()
    table.copy_frozen(1)
    slots, rows = table.take_frozen()
    table.release_frozen()
    remove(table, slot)
    del table
    assert (list(slots), bytes(rows)) == ([slot], packed(image=8, count=SIZE))
    with pytest.raises(TypeError):
        rows[0] = 1


def test_all_rows_of_a_log_that_was_replayed_whole_are_new_to_snapshots() -> None:
    table = SegmentTable()
    slots = [enter(table) for _ in range(5)]
    remove(table, slots[2])
    table.finish_restore()
    assert table.freeze() == 5  # the one that was removed has a tag
