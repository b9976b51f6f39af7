"""The routing directory against sorted lists and the paper's Algorithm 1, whatever the order of changes and merges."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.testing.core_access import probe, set_state, slots_after
from sarp_cluster.testing.reference_directory import PAPER_LAYOUT, WIDE_LAYOUT, FilterLayout, ReferenceDirectory

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


class DirectoryMachine(RuleBasedStateMachine):
    """Changes, states and merges in any order; small lists with colliding keys, and now and then a large one."""

    layout: FilterLayout

    def __init__(self) -> None:
        super().__init__()
        self.directory = RoutingDirectory(SarpParameters(config(self.layout)))
        self.reference = ReferenceDirectory(self.layout)

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

    @rule()
    def begin_merge(self) -> None:
        self.directory.begin_merge()
        assert self.directory.merging

    @rule(limit=st.integers(1, 80))
    def merge_step(self, limit: int) -> None:
        merging = self.directory.merging
        more = self.directory.merge_step(limit)
        assert merging or not more
        assert self.directory.merging == more

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
            directory.begin_merge()
        if step % 100 == 0:
            directory.merge_step(500)
        if step % 73_000 == 0:
            directory.validate()
    assert len(listed) > 195_000
    by_key: dict[int, list[tuple[int, int]]] = {}
    for key, value, slot in listed:
        by_key.setdefault(key, []).append((value, slot))
    reference.lists = {key: sorted(postings) for key, postings in by_key.items()}
    directory.validate()
    assert directory.postings() == reference.postings()
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


def test_a_list_that_was_discarded_and_merged_away_is_gone() -> None:
    directory = RoutingDirectory(SarpParameters(config(WIDE_LAYOUT)))
    for slot in range(FIRST_SLOT, FIRST_SLOT + 500):
        directory.add_posting(7, slot, 0, slot)
    directory.begin_merge()
    while directory.merge_step(100):
        pass
    assert (directory.overlay_postings, directory.base_postings) == (0, 500)
    for slot in range(FIRST_SLOT, FIRST_SLOT + 500):
        directory.discard_posting(7, slot, 0, slot)
    assert directory.overlay_postings == 500  # removals
    assert directory.candidates(7, 300, 0) == []
    assert probe(directory, 7, 0) == (False, 0)
    directory.begin_merge()
    while directory.merge_step(100):
        directory.validate()
    assert (directory.overlay_postings, directory.base_postings) == (0, 0)
    directory.validate()


def test_appending_in_order_packs_the_nodes() -> None:
    """A merge appends in order: its nodes end up full."""
    directory = RoutingDirectory(SarpParameters(config(WIDE_LAYOUT)))
    keys = list(range(20_000))
    random.Random(1).shuffle(keys)
    for key in keys:
        directory.add_posting(key, 0, 0, FIRST_SLOT + key)
    scattered = directory.resident_bytes
    directory.begin_merge()
    while directory.merge_step(1_000):
        pass
    directory.validate()
    assert directory.resident_bytes < 0.8 * scattered
    assert directory.resident_bytes < 30 * len(keys)
