"""The oracle itself, by examples worked out by hand."""

from __future__ import annotations

import pytest

from sarp_cluster.errors import StaleGenerationError, UnknownNamespaceError, UnknownPrefixError
from sarp_cluster.testing.reference_index import (
    Answer,
    ReferenceIndex,
    ReferenceNamespace,
    WorkerCounts,
    chained_block_ids,
)
from sarp_cluster.types import BlockLocation, HashProfile, NamespaceSpec, Tier, Worker

SPEC = NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE)
A, A1, B = Worker("a"), Worker("a", 1), Worker("b")


def ids(tokens: str) -> bytes:
    """Chained block IDs, one a letter."""
    return chained_block_ids(map(ord, tokens))


@pytest.fixture
def index() -> ReferenceIndex:
    return ReferenceIndex()


@pytest.fixture
def namespace(index: ReferenceIndex) -> ReferenceNamespace:
    return index.create_namespace(SPEC)


def test_block_ids_are_chained() -> None:
    assert ids("abc")[:16] == ids("abd")[:16]
    assert ids("abc")[16:] != ids("abd")[16:]
    assert ids("abc")[8:16] != ids("bb")[8:16]


def test_an_empty_index_matches_nothing(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    assert index.match(namespace, ids("abc")) == Answer(0, 0, [], None, False)
    assert index.match(namespace, b"", detail="blocks") == Answer(0, 0, [], [], False)


def test_a_match_ends_where_the_sequences_part(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    assert index.insert(namespace, ids("abcd"), worker=A).blocks_added == 4
    assert index.insert(namespace, ids("abxy"), worker=B).blocks_added == 2
    assert index.block_count() == 6
    assert index.match(namespace, ids("abcz")) == Answer(
        3, 3, [WorkerCounts("a", 0, 3, 3, 3, 3), WorkerCounts("b", 0, 2, 2, 2, 2)], None, False
    )


def test_ancestors_are_present_but_not_held(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("abcd"), worker=A, first=2)
    assert index.match(namespace, ids("abcd")) == Answer(0, 4, [], None, False)
    index.insert(namespace, ids("ab"), worker=B)
    answer = index.match(namespace, ids("abcd"), detail="blocks")
    assert answer.matched_blocks == 4
    assert answer.workers == [WorkerCounts("b", 0, 2, 2, 2, 2)]  # a holds nothing of the beginning
    assert answer.blocks == [[BlockLocation(B, Tier.GPU, None)]] * 2 + [[BlockLocation(A, Tier.GPU, None)]] * 2


def test_a_slower_tier_counts_what_faster_ones_hold(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("a"), worker=A, tier=Tier.GPU)
    index.insert(namespace, ids("abc"), worker=A, tier=Tier.SSD, first=1)
    index.insert(namespace, ids("abcd"), worker=A, tier=Tier.CPU, first=3)
    assert index.match(namespace, ids("abcd")).workers == [WorkerCounts("a", 0, 1, 1, 4, 4)]
    assert index.match(namespace, ids("abcd"), tiers={Tier.GPU}).workers == [WorkerCounts("a", 0, 1, 1, 1, 1)]
    assert index.match(namespace, ids("abcd"), tiers={Tier.SSD}).matched_blocks == 0


def test_workers_come_longest_first_then_by_id(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    for worker, held in ((B, "ab"), (A1, "ab"), (A, "ab"), (Worker("z"), "abc")):
        index.insert(namespace, ids(held), worker=worker)
    workers = [(w.instance_id, w.dp_rank) for w in index.match(namespace, ids("abc")).workers]
    assert workers == [("z", 0), ("a", 0), ("a", 1), ("b", 0)]
    cut = index.match(namespace, ids("abc"), max_workers=2)
    assert ([w.instance_id for w in cut.workers], cut.truncated) == (["z", "a"], True)
    assert not index.match(namespace, ids("abc"), max_workers=4).truncated


def test_filters_shorten_the_match(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("abcd"), worker=A)
    index.insert(namespace, ids("ab"), worker=B)
    answer = index.match(namespace, ids("abcd"), workers={B})
    assert (answer.matched_blocks, answer.verified_blocks) == (2, 4)
    assert [w.instance_id for w in answer.workers] == ["b"]


def test_detail_none_counts_only(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("ab"), worker=A)
    index.insert(namespace, ids("ab"), worker=B)
    assert index.match(namespace, ids("ab"), detail="none", max_workers=1) == Answer(2, 2, [], None, False)


def test_the_latest_handle_wins(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("ab"), worker=A, handle=7)
    index.insert(namespace, ids("ab"), worker=A, handle=9, first=1)
    index.insert(namespace, ids("ab"), worker=A, tier=Tier.CPU, first=1)
    assert index.match(namespace, ids("ab"), detail="blocks").blocks == [
        [BlockLocation(A, Tier.GPU, 7)],
        [BlockLocation(A, Tier.GPU, 9), BlockLocation(A, Tier.CPU, None)],
    ]


def test_a_removed_location_is_gone_and_the_block_stays(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("abcd"), worker=A)
    index.insert(namespace, ids("abcd"), worker=A, tier=Tier.CPU)
    assert index.remove(namespace, ids("abcd"), worker=A, tier=Tier.GPU, first=1, last=3) == 2
    assert index.match(namespace, ids("abcd")).workers == [WorkerCounts("a", 0, 1, 4, 4, 4)]
    assert index.remove(namespace, ids("abcd"), worker=A, first=2) == 3
    answer = index.match(namespace, ids("abcd"))
    assert (answer.matched_blocks, answer.verified_blocks) == (2, 4)
    assert index.remove(namespace, ids("abcd"), worker=B) == 0


def test_a_newer_generation_kills_what_is_older(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("abc"), worker=A, generation=2)
    index.insert(namespace, ids("abc"), worker=A1, generation=2)
    index.insert(namespace, ids("a"), worker=A, generation=3)
    assert index.match(namespace, ids("abc")).workers == [
        WorkerCounts("a", 1, 3, 3, 3, 3),
        WorkerCounts("a", 0, 1, 1, 1, 1),
    ]
    with pytest.raises(StaleGenerationError) as stale:
        index.insert(namespace, ids("abc"), worker=A, generation=2)
    assert stale.value.field == "generation"


def test_clearing_forgets_locations_and_seq(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    index.insert(namespace, ids("abc"), worker=A, seq=50)
    index.clear_worker(A, generation=1)
    answer = index.match(namespace, ids("abc"))
    assert (answer.matched_blocks, answer.verified_blocks) == (0, 3)
    assert index.insert(namespace, ids("ab"), worker=A, generation=1, seq=3).applied
    index.clear_worker(A, generation=1)  # the same again: nothing is older
    assert index.match(namespace, ids("abc")).matched_blocks == 2
    with pytest.raises(StaleGenerationError):
        index.clear_worker(A, generation=0)


def test_a_repeated_seq_changes_nothing(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    assert index.insert(namespace, ids("ab"), worker=A, seq=10).applied
    assert index.remove(namespace, ids("ab"), worker=A, seq=12) == 2
    late = index.insert(namespace, ids("abc"), worker=A, seq=10)
    assert (late.applied, late.blocks_added) == (False, 0)
    assert index.match(namespace, ids("abc"))[:2] == (0, 2)
    assert index.insert(namespace, ids("ab"), worker=A, seq=None).applied
    assert index.remove(namespace, ids("ab"), worker=A, seq=12) == 0
    assert index.insert(namespace, ids("ab"), worker=B, seq=1).applied  # each worker counts for itself


def test_an_insert_from_an_offset_needs_its_prefix(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    whole = ids("abcdefghij")
    index.insert(namespace, whole[:48], worker=A)
    result = index.insert(namespace, whole[4 * 8 :], worker=B, offset=4, first=8)
    assert (result.applied, result.blocks_added) == (True, 4)
    answer = index.match(namespace, whole, detail="blocks")
    assert (answer.matched_blocks, answer.verified_blocks) == (6, 10)
    answer = index.match(namespace, whole, workers={B})
    assert (answer.matched_blocks, answer.verified_blocks) == (0, 10)
    index.insert(namespace, whole[:64], worker=B)
    assert index.match(namespace, whole, workers={B}).matched_blocks == 10
    with pytest.raises(UnknownPrefixError) as unknown:
        index.insert(namespace, ids("xbcdefghij")[4 * 8 :], worker=B, offset=4, first=8, generation=1)
    assert unknown.value.field == "offset"
    assert index.generation(B) == 0  # refused: nothing has changed


def test_namespaces_share_nothing_but_the_workers(index: ReferenceIndex, namespace: ReferenceNamespace) -> None:
    other = index.create_namespace(NamespaceSpec(model="m", salt="s", hash_profile=HashProfile.OPAQUE))
    assert index.create_namespace(SPEC) is namespace
    index.insert(namespace, ids("ab"), worker=A)
    index.insert(other, ids("abc"), worker=A)
    assert index.match(namespace, ids("abc"))[:2] == (2, 2)
    index.clear_worker(A, generation=1)
    assert index.match(other, ids("abc"))[:2] == (0, 3)


def test_a_namespace_of_another_index_is_unknown(index: ReferenceIndex) -> None:
    foreign = ReferenceIndex().create_namespace(SPEC)
    with pytest.raises(UnknownNamespaceError):
        index.match(foreign, ids("a"))
