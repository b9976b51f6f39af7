"""The worker table: indexes, generations, sequence numbers."""

from __future__ import annotations

import random
import time

import pytest

from sarp_cluster import limits
from sarp_cluster.core.worker_table import WorkerTable
from sarp_cluster.errors import TooLargeError


def test_indexes_are_dense_and_given_once() -> None:
    table = WorkerTable()
    assert table.add("b", 0) == 0
    assert table.add("a", 1) == 1
    assert table.add("a", 0) == 2
    assert table.add("b", 0) == 0
    assert table.count == 3
    assert table.names == [("b", 0), ("a", 1), ("a", 0)]
    assert table.find("a", 1) == 1
    assert table.find("a", 2) is None
    assert table.find("", 0) is None


def test_a_new_worker_is_in_generation_0_and_has_no_seq() -> None:
    table = WorkerTable()
    index = table.add("w", 0)
    assert (table.generation(index), table.seq(index)) == (0, -1)


def test_seq_counts_within_a_generation() -> None:
    table = WorkerTable()
    one, other = table.add("w", 0), table.add("w", 1)
    table.set_seq(one, limits.SEQ_MAX)
    assert table.seq(one) == limits.SEQ_MAX
    table.set_generation(one, limits.GENERATION_MAX)
    assert (table.generation(one), table.seq(one)) == (limits.GENERATION_MAX, -1)
    assert (table.generation(other), table.seq(other)) == (0, -1)


def test_values_over_their_bounds_are_refused() -> None:
    table = WorkerTable()
    index = table.add("w", 0)
    for generation in (-1, limits.GENERATION_MAX + 1):
        with pytest.raises(OverflowError):
            table.set_generation(index, generation)
    with pytest.raises(OverflowError):
        table.set_seq(index, limits.SEQ_MAX + 1)
    assert (table.generation(index), table.seq(index)) == (0, -1)


def test_the_number_of_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WORKERS_MAX", 2)
    table = WorkerTable()
    table.add("a", 0)
    table.add("b", 0)
    with pytest.raises(TooLargeError, match="2 workers"):
        table.add("c", 0)
    assert table.add("a", 0) == 0
    assert table.count == 2


def test_many_workers_keep_their_state_while_the_table_grows() -> None:
    rng = random.Random(3)
    table = WorkerTable()
    names = [(f"node-{rng.randrange(10**9)}", rank) for rank in range(1_500)]
    for number, name in enumerate(names):
        assert table.add(*name) == number
        table.set_generation(number, number % 5)
        table.set_seq(number, number * 7)
    for number, name in enumerate(names):
        assert table.find(*name) == number
        assert (table.generation(number), table.seq(number)) == (number % 5, number * 7)


def names_of(count: int, order: str) -> list[tuple[str, int]]:
    if order == "between":  # each between the two before it: the gap halves each time
        low, high = "a", "b"
        names = [(low, 0), (high, 0)]
        for number in range(count - 2):
            middle = low + "m"
            names.append((middle, 0))
            low, high = (middle, high) if number % 2 else (low, middle)
            if len(low) > 200:
                low, high = f"c{number}", f"d{number}"
        return names
    names = [(f"node-{number:07}", 0) for number in range(count)]
    if order == "descending":
        names.reverse()
    if order == "random":
        random.Random(5).shuffle(names)
    return names


@pytest.mark.parametrize("order", ["ascending", "descending", "random", "between"])
def test_many_workers_are_entered_fast(order: str) -> None:
    table = WorkerTable()
    took = []
    for name in names_of(100_000, order):
        began = time.thread_time_ns()
        table.add(*name)
        took.append(time.thread_time_ns() - began)
    assert sum(took) < 10e9  # with all ranks given anew each time it was minutes
    assert sum(ns > 5_000_000 for ns in took) < 5  # the garbage collector may run in some


@pytest.mark.parametrize("order", ["ascending", "descending", "random", "between"])
def test_ranks_follow_the_names(order: str) -> None:
    table = WorkerTable()
    for name in names_of(3_000, order):
        table.add(*name)
    ranks = [table.rank_of(number) for number in range(table.count)]
    assert len(set(ranks)) == table.count
    by_rank = sorted(range(table.count), key=ranks.__getitem__)
    assert [table.names[number] for number in by_rank] == sorted(table.names)


def test_the_next_index_is_known_before_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    table = WorkerTable()
    assert table.find_or_next("a", 0) == 0
    assert table.count == 0
    assert table.add("a", 0) == 0
    assert (table.find_or_next("a", 0), table.find_or_next("b", 0)) == (0, 1)
    monkeypatch.setattr(limits, "WORKERS_MAX", 1)
    assert table.find_or_next("a", 0) == 0
    with pytest.raises(TooLargeError):
        table.find_or_next("b", 0)
