"""Slot maps: every slot has one owner, a change is the next map, two maps of one number are told apart."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SLOTS, PackedSlotMap, SlotMap
from sarp_cluster.errors import BadRequestError, EpochConflictError, TooLargeError

NONCE = bytes(range(NONCE_BYTES))
OTHER = bytes(NONCE_BYTES)
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
NONCES = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
KEYS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(1, limits.REQUEST_BLOCKS_MAX // 64 - 1).map(lambda n: n * 64)
SPLITS = st.dictionaries(KEYS, POSITIONS, max_size=8)


def owners(slot_map: SlotMap) -> list[str]:
    return [slot_map.owner(slot) for slot in range(SLOTS)]


@st.composite
def maps(draw: st.DrawFn) -> SlotMap:
    """A first map, and some changes of it."""
    slot_map = SlotMap.first(draw(NAMES), draw(NONCES), draw(SPLITS))
    for _ in range(draw(st.integers(0, 3))):
        moved = draw(st.dictionaries(st.integers(0, SLOTS - 1), st.text(min_size=1, max_size=8), max_size=5))
        slot_map = slot_map.changed(nonce=draw(NONCES), owners=moved, splits=draw(st.none() | SPLITS))
    return slot_map


@given(NAMES)
def test_in_the_first_map_each_shard_has_an_equal_contiguous_share(names: list[str]) -> None:
    slot_map = SlotMap.first(names, NONCE)
    assert slot_map.epoch == 1
    shares = [slot_map.slots_of(name) for name in sorted(names)]
    assert [slot for share in shares for slot in share] == list(range(SLOTS))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_first_map_does_not_depend_on_the_order_in_which_shards_joined() -> None:
    assert SlotMap.first(["a", "b", "c"], NONCE) == SlotMap.first(["c", "a", "b"], NONCE)


@given(maps())
def test_what_is_packed_is_unpacked(slot_map: SlotMap) -> None:
    raw = msgspec.msgpack.encode(slot_map.packed())
    again = SlotMap.unpacked(msgspec.msgpack.decode(raw, type=PackedSlotMap))
    assert again == slot_map
    assert hash(again) == hash(slot_map)
    assert owners(again) == owners(slot_map)
    assert again.splits == slot_map.splits


@given(maps(), st.dictionaries(st.integers(0, SLOTS - 1), st.text(min_size=1, max_size=8), max_size=20), NONCES)
def test_a_change_moves_what_it_says_and_leaves_the_map_before_it(
    before: SlotMap, moved: dict[int, str], nonce: bytes
) -> None:
    packed = before.packed()
    after = before.changed(nonce=nonce, owners=moved)
    assert before.packed() == packed
    assert (after.epoch, after.nonce, after.splits) == (before.epoch + 1, nonce, before.splits)
    assert owners(after) == [moved.get(slot, owner) for slot, owner in enumerate(owners(before))]
    assert sum(len(after.slots_of(name)) for name in after.shards) == SLOTS


def test_a_newer_map_supersedes_an_older_one() -> None:
    first = SlotMap.first(["a"], NONCE)
    second = first.changed(nonce=OTHER)
    assert first.supersedes(None)
    assert second.supersedes(first)
    assert not first.supersedes(second)
    assert not first.supersedes(SlotMap.first(["a"], NONCE))


def test_another_map_of_the_same_number_is_a_conflict() -> None:
    with pytest.raises(EpochConflictError, match="number 1"):
        SlotMap.first(["a"], NONCE).supersedes(SlotMap.first(["a"], OTHER))


def test_a_split_table_is_replaced_as_a_whole() -> None:
    slot_map = SlotMap.first(["a"], NONCE, {1: 64})
    assert dict(slot_map.changed(nonce=NONCE, splits={2: 128}).splits) == {2: 128}
    assert dict(slot_map.changed(nonce=NONCE, splits={}).splits) == {}
    with pytest.raises(TypeError):
        slot_map.splits[3] = 64  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda packed: {"epoch": 0}, "epoch"),
        (lambda packed: {"epoch": 2**63}, "epoch"),
        (lambda packed: {"nonce": b"short"}, "nonce"),
        (lambda packed: {"shards": []}, "shards"),
        (lambda packed: {"shards": ["a", "a"]}, "shards"),
        (lambda packed: {"shards": [str(n) for n in range(limits.SHARDS_MAX + 1)]}, "shards"),
        (lambda packed: {"shards": ["a"]}, "owners"),
        (lambda packed: {"owners": packed.owners[:-2]}, "owners"),
        (lambda packed: {"owners": packed.owners[:-1]}, "owners"),
        (lambda packed: {"owners": packed.owners + b"\0\0"}, "owners"),
        (lambda packed: {"splits": {1: 0}}, "splits"),
        (lambda packed: {"splits": {1: 63}}, "splits"),
        (lambda packed: {"splits": {1: -64}}, "splits"),
        (lambda packed: {"splits": {1: limits.REQUEST_BLOCKS_MAX}}, "splits"),
        (lambda packed: {"splits": {-1: 64}}, "splits"),
        (lambda packed: {"splits": {2**64: 64}}, "splits"),
        (lambda packed: {"version": 2}, "version"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused_by_field(
    change: Callable[[PackedSlotMap], dict[str, object]], field: str
) -> None:
    packed = SlotMap.first(["a", "b"], NONCE).packed()
    with pytest.raises(BadRequestError) as caught:
        SlotMap.unpacked(msgspec.structs.replace(packed, **change(packed)))
    assert caught.value.field == field


def test_too_many_splits_are_refused() -> None:
    with pytest.raises(TooLargeError, match="splits"):
        SlotMap.first(["a"], NONCE, dict.fromkeys(range(limits.SPLITS_MAX + 1), 64))
