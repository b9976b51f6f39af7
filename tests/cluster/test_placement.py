"""Stretches: they are the sequence, each ends where the table says, and its owner is that of its key's slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster.cluster.placement import ID_BYTES, slot_of, stretches
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SLOTS, SlotMap
from sarp_cluster.core.block_id import NamespaceKey, xxh3
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.types import NamespaceSpec

SHARDS = [f"shard-{number}" for number in range(5)]
NONCE = bytes(NONCE_BYTES)
BLOCKS_MAX = 400


def key_of(tenant: str) -> NamespaceKey:
    return NamespaceKey(derive_namespace_key(b"0123456789abcdef", NamespaceSpec(tenant=tenant, model="m")))


def pack(ids: list[int]) -> bytes:
    return b"".join(one.to_bytes(ID_BYTES, "little") for one in ids)


def internal_ids(ids: list[int], key: NamespaceKey) -> list[int]:
    packed = key.internal_ids(pack(ids))
    return [int.from_bytes(packed[at : at + ID_BYTES], "little") for at in range(0, len(packed), ID_BYTES)]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], dict[int, int]]:
    """Wire IDs, and a split table by *wire* ID in which many of them are, at positions behind and before their own."""
    count = draw(st.integers(0, BLOCKS_MAX))
    start = draw(st.integers(0, 2**63))
    ids = [start + 7 * number for number in range(count)]
    at = draw(st.lists(st.integers(0, max(0, count - 1)), max_size=8))
    hot = [ids[0], *(ids[place // 64 * 64] for place in at)] if ids else []
    table = {one: draw(st.integers(1, BLOCKS_MAX // 64 + 1)) * 64 for one in hot}
    return ids, table


def oracle(ids: list[int], internal: list[int], splits: dict[int, int]) -> list[tuple[int, int, int]]:
    """Block by block: the stretch a block is in is begun by the last block that a cut falls on."""
    begins = []
    cut = 0
    for position in range(len(ids)):
        if position == cut:
            begins.append(position)
            cut = splits.get(internal[position], 0)
    ends = [*begins[1:], len(ids)] if begins else []
    return [(begin, end, internal[begin]) for begin, end in zip(begins, ends, strict=True)]


@given(sequences())
def test_stretches_are_those_of_the_table(drawn: tuple[list[int], dict[int, int]]) -> None:
    ids, hot = drawn
    key = key_of("a")
    splits = dict(zip(internal_ids(list(hot), key), hot.values(), strict=True))
    slot_map = SlotMap.first(SHARDS, NONCE, splits)
    found = stretches(pack(ids), key, slot_map)
    assert [(one.start, one.end, one.key) for one in found] == oracle(ids, internal_ids(ids, key), splits)
    # Joined they are the whole sequence, each behind the one before.
    assert [position for one in found for position in range(one.start, one.end)] == list(range(len(ids)))
    for one in found:
        assert one.slot == slot_of(one.key)
        assert one.shard == slot_map.owner(one.slot)


@given(sequences(), st.integers(0, BLOCKS_MAX))
def test_a_prefix_is_cut_where_the_whole_is(drawn: tuple[list[int], dict[int, int]], length: int) -> None:
    """So whoever inserted the whole and whoever asks for a part of it go to the same owners."""
    ids, hot = drawn
    key = key_of("a")
    slot_map = SlotMap.first(SHARDS, NONCE, dict(zip(internal_ids(list(hot), key), hot.values(), strict=True)))
    whole = stretches(pack(ids), key, slot_map)
    part = stretches(pack(ids[:length]), key, slot_map)
    shorter = [one._replace(end=min(one.end, length)) for one in whole if one.start < min(length, len(ids))]
    assert part == shorter


def test_a_sequence_that_ends_at_the_position_has_one_stretch() -> None:
    key = key_of("a")
    ids = list(range(1, 130))
    splits = {internal_ids(ids, key)[0]: 128}
    slot_map = SlotMap.first(SHARDS, NONCE, splits)
    assert [(one.start, one.end) for one in stretches(pack(ids[:128]), key, slot_map)] == [(0, 128)]
    assert [(one.start, one.end) for one in stretches(pack(ids), key, slot_map)] == [(0, 128), (128, 129)]
    assert stretches(b"", key, slot_map) == []


def test_a_split_that_points_back_ends_nothing() -> None:
    """The block is found at a position behind the one its entry names, as in another sequence."""
    key = key_of("a")
    ids = list(range(1, 200))
    internal = internal_ids(ids, key)
    slot_map = SlotMap.first(SHARDS, NONCE, {internal[0]: 128, internal[128]: 64})
    assert [(one.start, one.end) for one in stretches(pack(ids), key, slot_map)] == [(0, 128), (128, 199)]


def test_a_hot_prefix_of_one_tenant_cuts_nothing_of_another() -> None:
    ids = list(range(1, 200))
    mine, theirs = key_of("a"), key_of("b")
    slot_map = SlotMap.first(SHARDS, NONCE, {internal_ids(ids, mine)[0]: 64})
    assert len(stretches(pack(ids), mine, slot_map)) == 2
    assert len(stretches(pack(ids), theirs, slot_map)) == 1


@given(st.integers(0, 2**64 - 1))
def test_a_slot_is_the_keys_xxh3(key: int) -> None:
    assert slot_of(key) == xxh3(key.to_bytes(8, "little")) % 4096
    assert 0 <= slot_of(key) < SLOTS


def test_slots_are_used_alike() -> None:
    counts = [0] * SLOTS
    for key in range(20 * SLOTS):
        counts[slot_of(key)] += 1
    assert max(counts) < 60
    assert min(counts) > 0
