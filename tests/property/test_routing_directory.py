"""The routing directory against sorted lists and the paper's Algorithm 1, whatever the order of changes and merges."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.posting_run import PostingRun
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.run_merge import RunMerge
from sarp_cluster.testing.core_access import probe, set_state, slots_after
from sarp_cluster.testing.reference_directory import PAPER_LAYOUT, WIDE_LAYOUT, FilterLayout, ReferenceDirectory

T = TypeVar("T")
FIRST_SLOT, SLOT_MAX = 4096, 2**31 - 4097
LOW_64 = 2**64 - 1
ALL_BITS = 2**128 - 1

KEYS = st.sampled_from([0, 1, 2**16, 2**48, 2**63, LOW_64])
POINTS = (0, 16, 56, 63)
SLOTS = st.integers(FIRST_SLOT, FIRST_SLOT + 5) | st.sampled_from([SLOT_MAX - 1, SLOT_MAX])


def config(layout: FilterLayout) -> IndexConfig:
    return IndexConfig(filter_bits=64 if layout is PAPER_LAYOUT else 128)


def filters(layout: FilterLayout) -> st.SearchStrategy[int]:
    """Filters that share leading fields often: fields take few values, the extremes among them."""

    def pack(values: list[int]) -> int:
        packed, shift = 0, 128
        for value, bits in zip(values, layout.field_bits, strict=True):
            shift -= bits
            packed |= (value & (2**bits - 1)) << shift
        return packed

    fields = st.lists(
        st.sampled_from([0, 0, 0, 1, 0x80, 0xFFFF]), min_size=len(layout.field_bits), max_size=len(layout.field_bits)
    )
    return fields.map(pack)


def assert_candidates(directory: RoutingDirectory, reference: ReferenceDirectory, key: int, query: int) -> None:
    """Complete, best first, and the best is what Algorithm 1 finds."""
    found = directory.candidates(key, query >> 64, query & LOW_64)
    assert sorted(found) == sorted(reference.candidates(key, query))
    assert all(left[1] >= right[1] for left, right in pairwise(found))
    potential = reference.largest_potential(key, query)
    assert (found[0][1] if found else -1) == potential // reference.layout.stride


def load_missed(directory: RoutingDirectory, chunks: dict[tuple[int, int], bytes]) -> bool:
    """Install the chunks that were wanted. False if none was."""
    missed = directory.take_missed()
    for number, chunk in missed:
        directory.install_chunk(number, chunk, chunks[number, chunk])
    return bool(missed)


def load_all(
    directory: RoutingDirectory, chunks: dict[tuple[int, int], bytes], only_missed_of: ReferenceDirectory
) -> None:
    """Ask for everything as long as something was missed, with the right answers in the end; then load the rest."""
    for key in [*only_missed_of.lists, 5]:
        for point in POINTS:
            while True:
                found = probe(directory, key, point)
                if not load_missed(directory, chunks):
                    break
            assert found == (key in only_missed_of.lists, only_missed_of.states.get((key, point), 0))
        while True:
            counted = directory.count(key)
            if not load_missed(directory, chunks):
                break
        assert counted == len(only_missed_of.lists.get(key, []))
        for value, _ in only_missed_of.lists.get(key, [])[:5]:
            while True:
                found_candidates = directory.candidates(key, value >> 64, value & LOW_64)
                if not load_missed(directory, chunks):
                    break
            assert sorted(found_candidates) == sorted(only_missed_of.candidates(key, value))
    for (number, chunk), data in chunks.items():
        directory.install_chunk(number, chunk, data)
    assert directory.unloaded == sum(run.unloaded for run in directory.runs) == 0


class DirectoryMachine(RuleBasedStateMachine):
    """Changes, states and merges in any order; small lists with colliding keys, and now and then a large one."""

    layout: FilterLayout

    def __init__(self) -> None:
        super().__init__()
        self.directory = RoutingDirectory(SarpParameters(config(self.layout)))
        self.directory.journaling = True
        self.reference = ReferenceDirectory(self.layout)
        self.merge: RunMerge | None = None
        self.runs_made = 0
        self.counts: tuple[int, int, set[tuple[int, int, int]]] = (0, 0, set())

    @rule(data=st.data(), key=KEYS, slot=SLOTS)
    def add(self, data: st.DataObject, key: int, slot: int) -> None:
        value = data.draw(filters(self.layout))
        expected = self.reference.add(key, value, slot)
        assert self.directory.add_posting(key, value >> 64, value & LOW_64, slot) == expected

    @rule(data=st.data(), key=KEYS, slot=SLOTS)
    def discard_any(self, data: st.DataObject, key: int, slot: int) -> None:
        value = data.draw(filters(self.layout))
        expected = self.reference.discard(key, value, slot)
        assert self.directory.discard_posting(key, value >> 64, value & LOW_64, slot) == expected

    @precondition(lambda self: self.reference.lists)
    @rule(data=st.data())
    def discard_one(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.reference.lists)))
        value, slot = data.draw(st.sampled_from(self.reference.lists[key]))
        assert self.reference.discard(key, value, slot)
        assert self.directory.discard_posting(key, value >> 64, value & LOW_64, slot)
        assert not self.directory.discard_posting(key, value >> 64, value & LOW_64, slot)

    @precondition(lambda self: self.reference.lists)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """An extension: the same slot under another filter."""
        key = data.draw(st.sampled_from(sorted(self.reference.lists)))
        value, slot = data.draw(st.sampled_from(self.reference.lists[key]))
        moved = data.draw(filters(self.layout))
        self.reference.discard(key, value, slot)
        assert self.directory.discard_posting(key, value >> 64, value & LOW_64, slot)
        assert self.directory.add_posting(key, moved >> 64, moved & LOW_64, slot) == self.reference.add(
            key, moved, slot
        )

    @rule(seed=st.integers(0, 999), key=KEYS, count=st.integers(60, 200))
    def add_many(self, seed: int, key: int, count: int) -> None:
        """Enough to split nodes."""
        rng = random.Random(seed)
        for _ in range(count):
            value = rng.getrandbits(128) & self.layout.mask(len(self.layout.field_bits))
            slot = rng.randint(FIRST_SLOT, SLOT_MAX)
            expected = self.reference.add(key, value, slot)
            assert self.directory.add_posting(key, value >> 64, value & LOW_64, slot) == expected

    @rule(key=KEYS)
    def discard_list(self, key: int) -> None:
        for value, slot in list(self.reference.lists.get(key, [])):
            self.reference.discard(key, value, slot)
            assert self.directory.discard_posting(key, value >> 64, value & LOW_64, slot)

    @rule(key=KEYS, point=st.sampled_from(POINTS), shift=st.sampled_from([0, 2, 4]))
    def advance_state(self, key: int, point: int, shift: int) -> None:
        """As back-fills do: absent, building, published; never back."""
        state = self.reference.states.get((key, point), 0)
        state += (1 << shift) if (state >> shift) & 3 < 2 else 0
        self.reference.states[key, point] = state
        set_state(self.directory, key, point, state)

    @precondition(lambda self: self.merge is None and not self.directory.frozen and len(self.directory.runs) < 9)
    @rule()
    def freeze(self) -> None:
        """As a snapshot does: the journal up to here belongs to what is frozen."""
        self.directory.take_journal()
        self.counts = (self.directory.registrations, self.directory.entries, set(self.directory.building))
        self.directory.freeze()
        assert self.directory.overlay_postings == 0

    @precondition(lambda self: self.merge is None and self.directory.frozen)
    @rule(more=st.integers(0, 3))
    def merge_frozen(self, more: int) -> None:
        levels = 1 + min(more, len(self.directory.runs))
        self.merge = self.directory.begin_merge(1, levels, self.next_run())

    @precondition(lambda self: self.merge is None and len(self.directory.runs) > 1)
    @rule(data=st.data())
    def merge_runs(self, data: st.DataObject) -> None:
        runs = len(self.directory.runs)
        levels = data.draw(st.integers(2, runs))
        first = data.draw(st.integers(0, runs - levels))
        self.merge = self.directory.begin_merge(1 + self.directory.frozen + first, levels, self.next_run())

    def next_run(self) -> int:
        self.runs_made += 1
        return self.runs_made

    @precondition(lambda self: self.merge is not None)
    @rule(limit=st.integers(1, 400))
    def merge_step(self, limit: int) -> None:
        assert self.merge is not None
        if not self.merge.step(limit):
            self.directory.finish_merge(self.merge)
            self.merge = None

    @precondition(lambda self: self.merge is None and not self.directory.frozen and len(self.directory.runs) < 9)
    @rule()
    def restart(self) -> None:
        """A directory that knows its runs by their indexes alone, and the journal since they were written."""
        fresh = RoutingDirectory(SarpParameters(config(self.layout)))
        self.chunks = {
            (run.number, chunk): bytes(run.chunk(chunk)) for run in self.directory.runs for chunk in range(run.chunks)
        }
        for run in self.directory.runs:
            fresh.attach(PostingRun.lazy(run.number, run.index()))
        fresh.restore_counts(*self.counts)
        fresh.journaling = True
        journal = self.directory.take_journal()
        fresh.apply_journal(journal)
        self.counts = (fresh.registrations, fresh.entries, set(fresh.building))
        assert fresh.building == self.directory.building
        assert fresh.missed == 0
        self.directory = fresh
        # What follows is journaled on top of what was: as if a snapshot had been taken right now.
        load_all(fresh, self.chunks, only_missed_of=self.reference)
        self.freeze_and_write()

    def freeze_and_write(self) -> None:
        self.directory.freeze()
        merge = self.directory.begin_merge(1, 1, self.next_run())
        while merge.step(1_000):
            pass
        self.directory.finish_merge(merge)

    @rule(data=st.data(), key=KEYS)
    def search(self, data: st.DataObject, key: int) -> None:
        assert_candidates(self.directory, self.reference, key, data.draw(filters(self.layout)))

    @precondition(lambda self: self.reference.lists)
    @rule(data=st.data())
    def search_a_listed_filter(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.reference.lists)))
        value, _ = data.draw(st.sampled_from(self.reference.lists[key]))
        assert_candidates(self.directory, self.reference, key, value)

    @rule(key=KEYS, limit=st.integers(0, 300))
    def count(self, key: int, limit: int) -> None:
        listed = len(self.reference.lists.get(key, []))
        assert self.directory.count(key) == listed
        assert self.directory.count(key, limit) == min(listed, limit)

    @rule(key=KEYS, step=st.integers(1, 70))
    def walk_in_steps(self, key: int, step: int) -> None:
        """As a back-fill walks a list: from its beginning, a few postings at a time."""
        walked: list[tuple[int, int]] = []
        after = (0, 0, 0)
        while found := slots_after(self.directory, key, *after, step):
            assert len(found) <= step
            walked += [(high << 64 | low, slot) for high, low, slot in found]
            after = found[-1]
        assert walked == self.reference.lists.get(key, [])

    @invariant()
    def agrees(self) -> None:
        self.directory.validate()
        assert self.directory.postings() == self.reference.postings()
        assert self.directory.entries == len(self.reference.lists)
        assert self.directory.registrations == sum(map(len, self.reference.lists.values()))
        for key in (0, 1, 2**16, 2**48, 2**63, LOW_64, 5):
            for point in POINTS:
                expected = (key in self.reference.lists, self.reference.states.get((key, point), 0))
                assert probe(self.directory, key, point) == expected


class PaperMachine(DirectoryMachine):
    """64 bits, stride 2."""

    layout = PAPER_LAYOUT


class WideMachine(DirectoryMachine):
    """128 bits, a wide first field."""

    layout = WIDE_LAYOUT


TestPaperLayout = PaperMachine.TestCase
TestWideLayout = WideMachine.TestCase
TestPaperLayout.settings = TestWideLayout.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_layouts_are_the_indexs() -> None:
    for layout in (PAPER_LAYOUT, WIDE_LAYOUT):
        settings_ = config(layout)
        assert sum(layout.field_bits) == settings_.filter_bits
        assert layout.field_bits[0] == settings_.filter_first_bits
        assert layout.stride == settings_.stride


@pytest.mark.parametrize("layout", [PAPER_LAYOUT, WIDE_LAYOUT], ids=["paper", "wide"])
def test_a_directory_of_many_postings(layout: FilterLayout) -> None:
    """Grows to 200,000 postings in long and short lists while merges go on, and shrinks by a part of them."""
    rng = random.Random(11)
    directory = RoutingDirectory(SarpParameters(config(layout)))
    reference = ReferenceDirectory(layout)
    hot = rng.getrandbits(64)
    used = layout.mask(len(layout.field_bits))
    listed: list[tuple[int, int, int]] = []
    for step in range(1, 220_001):
        if listed and rng.random() < 0.05:
            place = rng.randrange(len(listed))
            key, value, slot = listed[place]
            listed[place] = listed[-1]
            listed.pop()
            assert directory.discard_posting(key, value >> 64, value & LOW_64, slot)
        else:
            key = hot if step % 3 else rng.getrandbits(10) << 40
            value = (rng.getrandbits(20) << 108 | rng.getrandbits(108)) & used
            slot = FIRST_SLOT + step
            assert directory.add_posting(key, value >> 64, value & LOW_64, slot)
            listed.append((key, value, slot))
        if step % 30_000 == 0:
            snapshot(directory, step)
        if step % 90_000 == 0:
            merge_levels(directory, 1, 2, step + 1)
        if step % 73_000 == 0:
            directory.validate()
    assert len(listed) > 195_000
    by_key: dict[int, list[tuple[int, int]]] = {}
    for key, value, slot in listed:
        by_key.setdefault(key, []).append((value, slot))
    reference.lists = {key: sorted(postings) for key, postings in by_key.items()}
    directory.validate()
    assert directory.postings() == reference.postings()
    assert len(directory.runs) > 4
    directory, chunks = reopened(directory, layout)
    assert 0 < directory.unloaded == len(chunks)
    ask(directory, chunks, lambda: directory.count(hot))
    some = [one for one in rng.sample(listed, 50) if one[0] != hot]
    for key, _, _ in some:
        assert ask(directory, chunks, lambda key=key: directory.count(key)) == len(by_key[key])  # type: ignore[misc]
    assert directory.unloaded < len(chunks)
    while ask(directory, chunks, directory.postings) != reference.postings():
        pytest.fail("a directory that was loaded piece by piece differs")
    assert directory.unloaded == 0
    assert directory.registrations == len(listed)
    assert directory.entries == len(by_key)
    for key, value, _ in rng.sample([one for one in listed if one[0] != hot], 300):
        bits = sum(layout.field_bits[: rng.randrange(len(layout.field_bits) + 1)])
        query = (value ^ rng.getrandbits(128) >> bits) & used  # agrees in some leading fields
        assert_candidates(directory, reference, key, query)
    for _ in range(3):
        _, value, _ = rng.choice(listed)
        assert_candidates(directory, reference, hot, value)
        assert_candidates(directory, reference, hot, rng.getrandbits(128) & used)
    assert directory.count(hot) == len(by_key[hot])
    walked, after = 0, (0, 0, 0)
    while found := slots_after(directory, hot, *after, 1_000):
        walked += len(found)
        after = found[-1]
    assert walked == len(by_key[hot])


def snapshot(directory: RoutingDirectory, number: int) -> None:
    """Freeze the overlay and write it as a run."""
    directory.freeze()
    merge_levels(directory, 1, 1, number)


def merge_levels(directory: RoutingDirectory, first: int, levels: int, number: int) -> None:
    """Merge neighbouring levels into a run."""
    merge = directory.begin_merge(first, levels, number)
    while merge.step(100):
        pass
    directory.finish_merge(merge)


def reopened(
    directory: RoutingDirectory, layout: FilterLayout
) -> tuple[RoutingDirectory, dict[tuple[int, int], bytes]]:
    """As after a snapshot and a restart: all in runs, none of them in memory. And the chunks."""
    snapshot(directory, 2**31)
    chunks = {(run.number, chunk): bytes(run.chunk(chunk)) for run in directory.runs for chunk in range(run.chunks)}
    fresh = RoutingDirectory(SarpParameters(config(layout)))
    for run in directory.runs:
        fresh.attach(PostingRun.lazy(run.number, run.index()))
    fresh.restore_counts(directory.registrations, directory.entries, directory.building)
    return fresh, chunks


def ask(directory: RoutingDirectory, chunks: dict[tuple[int, int], bytes], question: Callable[[], T]) -> T:
    """The answer of a directory whose chunks are loaded as they are missed."""
    while True:
        answer = question()
        if not load_missed(directory, chunks):
            return answer


def test_a_list_that_was_discarded_and_merged_away_is_gone() -> None:
    directory = RoutingDirectory(SarpParameters(config(WIDE_LAYOUT)))
    for slot in range(FIRST_SLOT, FIRST_SLOT + 500):
        directory.add_posting(7, slot, 0, slot)
    snapshot(directory, 1)
    assert (directory.overlay_postings, [run.postings for run in directory.runs]) == (0, [500])
    for slot in range(FIRST_SLOT, FIRST_SLOT + 500):
        directory.discard_posting(7, slot, 0, slot)
    assert directory.overlay_postings == 500  # removals
    assert directory.candidates(7, 300, 0) == []
    assert probe(directory, 7, 0) == (False, 0)
    snapshot(directory, 2)
    directory.validate()
    assert [run.postings for run in directory.runs] == [500, 500]
    merge_levels(directory, 1, 2, 3)
    assert [run.postings for run in directory.runs] == [0]
    directory.validate()


def test_what_was_removed_and_registered_again_is_there_once_after_a_replay_over_an_older_snapshot() -> None:
    """The journal is laid over a state older than the one it was written against, when a newer snapshot was damaged."""
    directory = RoutingDirectory(SarpParameters(config(WIDE_LAYOUT)))
    directory.journaling = True
    directory.add_posting(7, 1, 0, FIRST_SLOT)
    before = directory.take_journal()
    snapshot(directory, 1)
    directory.discard_posting(7, 1, 0, FIRST_SLOT)
    directory.add_posting(7, 1, 0, FIRST_SLOT)
    after = directory.take_journal()
    for payloads in (before + after, [*before, *after, *after]):
        fresh = RoutingDirectory(SarpParameters(config(WIDE_LAYOUT)))
        fresh.apply_journal(payloads)
        assert fresh.postings() == directory.postings() == [(7, 1, 0, FIRST_SLOT)]
        fresh.validate()


def test_a_snapshot_packs() -> None:
    """A run takes 28 bytes a posting, but for its last chunk."""
    directory = RoutingDirectory(SarpParameters(config(WIDE_LAYOUT)))
    keys = list(range(20_000))
    random.Random(1).shuffle(keys)
    for key in keys:
        directory.add_posting(key << 45, 0, 0, FIRST_SLOT + key)
    scattered = directory.resident_bytes
    snapshot(directory, 1)
    directory.validate()
    assert directory.resident_bytes < 0.8 * scattered
    assert directory.resident_bytes < 33 * len(keys)
