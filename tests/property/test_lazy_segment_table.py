"""A segment table that crashes, comes back page by page and takes snapshots while it changes, against a dictionary."""

from __future__ import annotations

import copy
import struct
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import InvariantViolationError
from sarp_cluster.testing.core_access import (
    allocate,
    end_stale,
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
PAGE_ROWS = 1024
SIZE = 4
ROW = struct.Struct("<QQIIIIHHBBH")
Row = dict[str, Any]


def pack(fields: Row) -> bytes:
    """A row as the table holds it."""
    return ROW.pack(
        *(fields[name] for name in ("image", "delta", "parent", "origin", "children", "namespace", "window", "tag")),
        fields["fork"],
        fields["count"],
        fields["stale"],
    )


def page_of(slot: int) -> int:
    return (slot - FIRST_SLOT) // PAGE_ROWS


@dataclass
class Snapshot:
    """What is durable: rows as (slot, 40 bytes), the counters, and how much of the log they include."""

    rows: dict[int, bytes] = field(default_factory=dict)
    header: tuple[int, int, int, int, int] = (FIRST_SLOT, 0, 0, 0, 0)
    log_begin: int = 0

    def page(self, page: int) -> tuple[array[int], bytes]:
        slots = sorted(slot for slot in self.rows if page_of(slot) == page)
        return array("I", slots), b"".join(self.rows[slot] for slot in slots)


class SegmentTableMachine(RuleBasedStateMachine):
    """`rows` is the truth; `log` what was recorded since the beginning; `snapshot` what a crash leaves beside it."""

    @initialize(slots=st.sets(st.integers(0, 2_200), max_size=12), end=st.integers(2_201, 3_072))
    def begin(self, slots: set[int], end: int) -> None:
        """Two or three pages with a few rows: with a snapshot to begin from there need not be thousands of them."""
        self.rows: dict[int, Row] = {}
        self.free_stale: set[int] = set()
        self.log: list[tuple[str, Row, bool]] = []
        self.place = 8
        for slot in sorted(slots):
            self.rows[FIRST_SLOT + slot] = self.segment(FIRST_SLOT + slot, 0)
        rows = {slot: pack(one) for slot, one in self.rows.items()}
        self.snapshot = Snapshot(rows, (FIRST_SLOT + end, *self.counters()))
        self.coming: tuple[Snapshot, dict[int, Row]] | None = None
        self.table = SegmentTable()
        self.table.begin_lazy(*self.snapshot.header)
        self.table.finish_replay()

    # --- the ways in which a table changes ----------------------------------------------------------------------------

    def next_place(self) -> int:
        self.place += 8
        return self.place

    def counters(self) -> tuple[int, int, int, int]:
        rows = self.rows.values()
        return (
            len(rows),
            sum(one["count"] - one["fork"] for one in rows),
            sum(one["count"] for one in rows),
            sum(one["delta"] != 0 for one in rows),
        )

    def want(self, *slots: int) -> None:
        """Have the pages of these slots loaded, as a search does."""
        self.table.clear_missed()
        missing = {page_of(slot) for slot in slots if slot and row(self.table, slot) is None}
        assert set(self.table.missed_pages()) == missing
        for page in missing:
            self.table.install_page(page, *self.snapshot.page(page))

    def write(self, kind: str, fields: Row, *, had_delta: bool = False, before: int = 0) -> None:
        record = fields | {"ids": [0] * fields["count"], "count_before": before}
        self.log.append((kind, record, had_delta))
        store(self.table, make_unread_batch([record]))

    def segment(self, slot: int, tag: int) -> Row:
        return {
            "slot": slot, "tag": tag, "window": 0, "namespace": 1, "parent": 0, "origin": 0, "children": 0, "fork": 0,
            "count": SIZE, "image": self.next_place(), "delta": 0, "stale": 0,
        }  # fmt: skip

    def enter(self, fields: Row) -> None:
        slot, tag = allocate(self.table)
        assert slot not in self.rows.keys() | self.free_stale
        new = self.segment(slot, tag) | fields
        self.write("image", new)
        self.rows[slot] = new
        for other in (new["parent"], new["origin"]):
            if other:
                self.rows[other]["children"] += 1

    @rule()
    def add_root(self) -> None:
        self.enter({})

    def pick(self, data: st.DataObject) -> Row:
        """Any segment; often one of the last."""
        slots = list(self.rows)
        if data.draw(st.booleans()):
            slots = slots[-5:]
        return self.rows[slots[data.draw(st.integers(0, len(slots) - 1))]]

    @rule(data=st.data(), count=st.integers(1, SIZE))
    @precondition(lambda self: self.rows)
    def add_child(self, data: st.DataObject, count: int) -> None:
        parent = self.pick(data)
        if parent["count"] == SIZE and parent["window"] < 9:
            self.want(parent["slot"])
            self.enter({"parent": parent["slot"], "window": parent["window"] + 1, "count": count})

    @rule(data=st.data(), count=st.integers(1, SIZE))
    @precondition(lambda self: self.rows)
    def add_copy(self, data: st.DataObject, count: int) -> None:
        origin = self.pick(data)
        fork = data.draw(st.integers(origin["fork"] + 1, origin["count"])) if origin["fork"] < origin["count"] else 0
        if 0 < fork <= count:
            self.want(origin["slot"], origin["parent"])
            fields = {"origin": origin["slot"], "parent": origin["parent"], "window": origin["window"]}
            self.enter(fields | {"fork": fork, "count": count})

    @rule(data=st.data(), fold=st.booleans())
    @precondition(lambda self: self.rows)
    def change(self, data: st.DataObject, fold: bool) -> None:
        old = self.pick(data)
        self.want(old["slot"])
        new = old | {"count": data.draw(st.integers(old["count"], SIZE))}
        new |= {"image": self.next_place(), "delta": 0} if fold else {"delta": self.next_place()}
        self.write("image" if fold else "delta", new, had_delta=old["delta"] != 0, before=old["count"])
        self.rows[old["slot"]] = new

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def cut(self, data: st.DataObject) -> None:
        """What a damaged segment becomes on which only copies depend."""
        old = self.pick(data)
        dependents = [one for one in self.rows.values() if old["slot"] in (one["parent"], one["origin"])]
        kept = max([old["fork"] + 1, *(one["fork"] for one in dependents if one["origin"] == old["slot"])])
        if kept >= old["count"] or any(one["parent"] == old["slot"] for one in dependents):
            return
        self.want(old["slot"])
        new = old | {"count": kept, "image": self.next_place(), "delta": 0, "stale": 1}
        self.write("image", new, had_delta=old["delta"] != 0, before=old["count"])
        self.rows[old["slot"]] = new

    @rule(data=st.data())
    def end_a_stale_mark(self, data: st.DataObject) -> None:
        """Nothing of what the slot was is left elsewhere. The log does not say so, the next snapshot does."""
        stale = sorted(self.free_stale | {slot for slot, one in self.rows.items() if one["stale"]})
        if not stale:
            return
        slot = stale[data.draw(st.integers(0, len(stale) - 1))]
        self.want(slot)
        end_stale(self.table, slot)
        self.free_stale.discard(slot)
        if slot in self.rows:
            self.rows[slot]["stale"] = 0

    @rule(data=st.data(), stale=st.booleans())
    @precondition(lambda self: self.rows)
    def take_out(self, data: st.DataObject, stale: bool) -> None:
        gone = self.pick(data)
        if gone["children"]:
            return
        self.want(gone["slot"], gone["parent"], gone["origin"])
        stale = stale or bool(gone["stale"])
        self.log.append(("removal", gone | {"ids": [0] * gone["count"]}, stale))
        remove(self.table, gone["slot"], stale)
        del self.rows[gone["slot"]]
        if stale:
            self.free_stale.add(gone["slot"])
        for other in (gone["parent"], gone["origin"]):
            if other:
                self.rows[other]["children"] -= 1

    @rule(count=st.integers(1, 5))
    def give_back_slots(self, count: int) -> None:
        """An insert that is given up."""
        slots = [allocate(self.table)[0] for _ in range(count)]
        assert not set(slots) & set(self.rows)
        for slot in slots:
            release(self.table, slot)

    @rule(data=st.data())
    @precondition(lambda self: self.table.unloaded_pages)
    def change_without_loading(self, data: st.DataObject) -> None:
        unloaded = [one for slot, one in self.rows.items() if row(self.table, slot) is None]
        if not unloaded:
            return
        old = unloaded[data.draw(st.integers(0, len(unloaded) - 1))]
        before = self.table.version
        with pytest.raises(InvariantViolationError, match="not loaded"):
            store(self.table, make_unread_batch([old | {"ids": [0] * old["count"]}]))
        with pytest.raises(InvariantViolationError, match="not loaded"):
            remove(self.table, old["slot"])
        assert self.table.version == before

    # --- snapshots and crashes ----------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: self.coming is None)
    def freeze(self) -> None:
        for page in self.table.pages_with_patches():
            with pytest.raises(InvariantViolationError, match="not loaded"):
                self.table.freeze()
            self.table.install_page(page, *self.snapshot.page(page))
        table = self.table
        header = (table.slots_end, table.segments, table.blocks, table.block_entries, table.deltas)
        self.coming = (Snapshot(dict(self.snapshot.rows), header, len(self.log)), copy.deepcopy(self.rows))
        assert table.freeze() >= 0
        assert table.dirty_rows == 0

    @rule(limit=st.integers(1, 4))
    @precondition(lambda self: self.coming is not None)
    def copy_some(self, limit: int) -> None:
        self.table.copy_frozen(limit)

    @rule()
    @precondition(lambda self: self.coming is not None)
    def end_snapshot(self) -> None:
        assert self.coming is not None
        snapshot, rows = self.coming
        while self.table.copy_frozen(500):
            pass
        slots, frozen = self.table.take_frozen()
        assert sorted(set(slots)) == list(slots)
        snapshot.rows |= {
            slot: bytes(frozen[ROW.size * number : ROW.size * (number + 1)]) for number, slot in enumerate(slots)
        }
        in_use = {slot: one for slot, one in snapshot.rows.items() if ROW.unpack(one)[9]}
        assert in_use == {slot: pack(one) for slot, one in rows.items()}
        self.table.release_frozen()
        self.snapshot, self.coming = snapshot, None

    @rule()
    @precondition(lambda self: self.coming is not None)
    def snapshot_fails(self) -> None:
        self.table.thaw()
        self.coming = None

    @rule(data=st.data(), loads=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=4))
    def crash(self, data: st.DataObject, loads: list[tuple[int, int]]) -> None:
        """Begin again from the snapshot and the log behind it. Pages may be loaded before and while it is replayed."""
        self.coming = None
        self.table = table = SegmentTable()
        table.begin_lazy(*self.snapshot.header)
        tail = self.log[self.snapshot.log_begin :]
        self.forget_ends(tail)
        for number, (kind, record, flag) in enumerate(tail):
            for at, page in loads:
                if at == number and page < table.unloaded_pages:
                    table.install_page(page, *self.snapshot.page(page))
            batch = make_unread_batch([record])
            if kind == "image":
                assert replay_images(table, batch, flag)
            elif kind == "delta":
                assert replay_deltas(table, batch, flag)
            else:
                assert replay_removals(table, batch, flag)
        table.finish_replay()
        self.check_counters()

    def forget_ends(self, tail: list[tuple[str, Row, bool]]) -> None:
        """Marks that ended since the snapshot are there again, unless the segment went or came after that."""
        stale = {slot for slot, one in self.snapshot.rows.items() if ROW.unpack(one)[10]}
        for kind, record, flag in tail:
            if (kind == "removal" and flag) or (kind == "image" and record["count"] < record["count_before"]):
                stale.add(record["slot"])
            elif kind == "removal" or (kind == "image" and not record["count_before"]):
                stale.discard(record["slot"])
        for slot, one in self.rows.items():
            one["stale"] = int(slot in stale)
        self.free_stale = stale - self.rows.keys()

    @rule()
    @precondition(lambda self: self.table.unloaded_pages)
    def load_next(self) -> None:
        page = self.table.next_unloaded(0)
        self.table.install_page(page, *self.snapshot.page(page))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        self.check_counters()
        self.check_rows()

    def check_counters(self) -> None:
        table = self.table
        assert (table.segments, table.blocks, table.block_entries, table.deltas) == self.counters()
        table.validate_lists()

    def check_rows(self) -> None:
        for slot, wanted in self.rows.items():
            found = row(self.table, slot)
            if found is not None:
                assert self.table.describe(slot) == {name: wanted[name] for name in wanted if name != "stale"}
                assert found == pack(wanted)
        self.table.clear_missed()

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.check_rows()
        while (page := self.table.next_unloaded(0)) >= 0:
            self.table.install_page(page, *self.snapshot.page(page))
        self.check_rows()
        assert self.table.stale.keys() == self.free_stale | {slot for slot, one in self.rows.items() if one["stale"]}
        assert [slot for slots in self.table.slots_in_use(100) for slot in slots] == sorted(self.rows)
        self.table.validate(SIZE)


TestSegmentTable = SegmentTableMachine.TestCase
