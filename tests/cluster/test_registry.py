"""The registry is a state: in whatever order and however often changes come, it ends the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.errors import InvariantViolationError
from sarp_cluster.types import NamespaceSpec


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """Changes of a few things, numbered from 1 on; generations and purges grow."""
    changes: list[Entry] = []
    generations: dict[str, int] = {}
    purges: dict[str, int] = {}
    for number in range(1, draw(st.integers(0, 20)) + 1):
        name = draw(st.sampled_from("abc"))
        match draw(st.sampled_from(["namespace", "worker", "tenant"])):
            case "namespace":
                changes.append(NamespaceEntry(number, name, NamespaceSpec(model=f"m{number}")))
            case "worker":
                generations[name] = generations.get(name, 0) + draw(st.integers(0, 2))
                changes.append(WorkerEntry(number, name, 0, "owner", generations[name]))
            case _:
                purges[name] = purges.get(name, 0) + 1
                changes.append(TenantEntry(number, name, purges[name]))
    return changes


def state(registry: Registry) -> tuple[int, list[Entry]]:
    registry.validate()
    return registry.number, registry.entries()


@given(histories(), st.randoms(use_true_random=False), st.data())
def test_any_order_with_repetitions_gives_the_same(
    changes: list[Entry], rng: random.Random, data: st.DataObject
) -> None:
    wanted = state(Registry(changes))
    shuffled = changes + data.draw(st.lists(st.sampled_from(changes), max_size=10) if changes else st.just([]))
    rng.shuffle(shuffled)
    registry = Registry()
    while shuffled:
        count = rng.randint(1, len(shuffled))
        registry.apply(shuffled[:count])
        registry.validate()
        del shuffled[:count]
    assert state(registry) == wanted


@given(histories(), st.integers(0, 20))
def test_entries_above_a_nodes_number_suffice_to_catch_up(changes: list[Entry], known: int) -> None:
    """Whatever prefix a node has, it needs what is above its number, once each."""
    known = min(known, len(changes))
    whole, node = Registry(changes), Registry(changes[:known])
    news = whole.entries(above=node.number)
    assert len(news) <= len(changes) - known
    assert node.apply(news, whole.number) == news
    assert state(node) == state(whole)


@given(histories())
def test_what_is_there_is_no_news(changes: list[Entry]) -> None:
    registry = Registry(changes)
    assert registry.apply(changes) == []
    assert registry.apply(registry.entries()) == []
    assert len(registry) == len(registry.entries())


def test_an_older_change_does_not_undo_a_newer_one() -> None:
    registry = Registry()
    cleared = WorkerEntry(5, "w", 0, "owner", generation=2)
    registry.apply([cleared])
    assert registry.apply([WorkerEntry(3, "w", 0, "owner", generation=1)]) == []
    assert registry.workers[cleared.worker] == cleared


def test_the_number_may_be_above_all_entries() -> None:
    """What change 7 changed was changed again, or was nothing."""
    registry = Registry([TenantEntry(3, "t", 1)], 7)
    assert state(registry) == (7, [TenantEntry(3, "t", 1)])
    assert registry.purges("t") == 1
    assert registry.purges("other") == 0
    registry.apply([], 6)
    assert registry.number == 7


def test_ranks_of_one_instance_are_different_workers() -> None:
    registry = Registry([WorkerEntry(1, "w", 0, "o"), WorkerEntry(2, "w", 1, "o")])
    assert len(registry.workers) == 2
    assert registry.lookup(WorkerEntry(9, "w", 1, "o")) == WorkerEntry(2, "w", 1, "o")


@pytest.mark.parametrize(
    "entries", [[TenantEntry(0, "t", 1)], [TenantEntry(1, "t", 1), WorkerEntry(1, "w", 0, "o")]], ids=["zero", "twice"]
)
def test_bad_numbers_are_found(entries: list[Entry]) -> None:
    with pytest.raises(InvariantViolationError, match="G1"):
        Registry(entries).validate()
