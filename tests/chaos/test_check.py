"""The checker bites: what must not be is told, and what may be is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.check import Checker, Fault
from tests.chaos.ledger import Asked, Begun, Ended, Line
from tests.chaos.nemesis import blows
from tests.chaos.workload import Placement, Session, Turn

IDS = b"".join(number.to_bytes(8, "little") for number in range(1, 11))
OTHER = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 104, 105))
EVERY = [Session("t", IDS, (Turn(4, 10),)), Session("t", OTHER, (Turn(3, 5),))]
OWNER = Placement(EVERY).owners(IDS)[0]


def change(number: int, began: float, ended: float | None, kind: Any = "insert", **more: Any) -> list[Line]:
    how = more.pop("how", "acked")
    done = more.pop("done", 0)
    first: dict[str, Any] = {"worker": "w", "session": 0, "first": 0, "last": 10}
    lines: list[Line] = [Begun(number=number, at=began, kind=kind, **(first | more))]
    if ended is not None:
        lines.append(Ended(number=number, at=ended, how=how, generation=done))
    return lines


def asked(began: float, ended: float, matched: int, **more: Any) -> Asked:
    answer: dict[str, Any] = {
        "workers": {"w": matched} if matched else {},
        "complete": True,
        "session": 0,
        "blocks": 10,
    }
    return Asked(began=began, ended=ended, phase="p", wire="here", matched=matched, **(answer | more))


def wrong(*lines: Line | list[Line], faults: tuple[Fault, ...] = ()) -> list[str]:
    flat = [line for one in lines for line in (one if isinstance(one, list) else [one])]
    return sorted(Checker(EVERY, flat, faults).report()["wrong"])


INSERTED = change(1, 1, 2)
REMOVED = change(2, 5, 6, "remove", first=4)
CLEARED = change(2, 5, 6, "clear", done=1)


def test_what_was_acknowledged_is_there() -> None:
    assert wrong(INSERTED, asked(3, 4, 10)) == []
    assert wrong(INSERTED, asked(3, 4, 9)) == ["lost"]
    assert wrong(INSERTED, asked(3, 4, 0)) == ["lost"]


def test_its_holder_is_named_as_far_as_it_holds_it() -> None:
    both = [*INSERTED, *change(2, 1, 2, worker="v", session=1, last=5)]
    assert wrong(both, asked(3, 4, 10, workers={"w": 10, "v": 3})) == []
    assert wrong(both, asked(3, 4, 10, workers={"w": 10})) == ["lost"]
    assert wrong(both, asked(3, 4, 10, workers={"w": 10, "v": 4})) == ["wrong block"]
    assert wrong(both, asked(3, 4, 10, workers={"w": 9, "v": 3})) == ["lost"]


@pytest.mark.parametrize("matched", [0, 5, 10])
@pytest.mark.parametrize("ended", [None, 8.0])
def test_what_is_under_way_may_be_there_or_not(matched: int, ended: float | None) -> None:
    assert wrong(change(1, 1, ended), asked(3, 4, matched)) == []


def test_nothing_is_answered_before_it_was_sent_or_that_nobody_sent() -> None:
    assert wrong(change(1, 5, 6), asked(3, 4, 1)) == ["wrong block"]
    assert wrong(change(1, 1, 2, last=5), asked(3, 4, 6)) == ["wrong block"]


def test_what_was_refused_never_comes() -> None:
    assert wrong(change(1, 1, 2, how="refused"), asked(3, 4, 0)) == []
    assert wrong(change(1, 1, 2, how="refused"), asked(3, 4, 2)) == ["wrong block"]
    assert wrong(INSERTED, change(2, 5, 6, "remove", first=4, how="refused"), asked(7, 8, 4)) == ["lost"]


@pytest.mark.parametrize(("undone", "left"), [(REMOVED, 4), (CLEARED, 0)])
def test_nothing_comes_back(undone: list[Line], left: int) -> None:
    assert wrong(INSERTED, undone, asked(7, 8, left)) == []
    assert wrong(INSERTED, undone, asked(7, 8, 10)) == ["wrong block"]
    assert wrong(INSERTED, undone, asked(5.5, 8, 10)) == []  # asked before it was answered
    assert wrong(INSERTED, undone, asked(5.5, 8, left)) == []
    assert wrong(INSERTED, undone, asked(3, 4, left)) == ["lost"]


def test_what_is_inserted_again_is_there_again() -> None:
    assert wrong(INSERTED, REMOVED, change(3, 9, 10, first=4), asked(11, 12, 10)) == []
    assert wrong(INSERTED, REMOVED, change(3, 9, 10, first=4), asked(11, 12, 4)) == ["lost"]
    assert wrong(INSERTED, CLEARED, change(3, 9, 10, last=5, generation=1), asked(11, 12, 5)) == []
    assert wrong(INSERTED, CLEARED, change(3, 9, 10, last=5, generation=1), asked(11, 12, 6)) == ["wrong block"]


def test_an_answer_is_cut_only_while_an_owner_cannot_answer() -> None:
    cut = asked(3, 4, 0, complete=False, degraded=("shard_down",))
    assert wrong(INSERTED, cut) == ["incomplete though all owners live"]
    for shard, excused in ((OWNER, True), ("*", True), ("another", False)):
        assert (wrong(INSERTED, cut, faults=(Fault(shard, 3.5, 9),)) == []) is excused
        assert wrong(INSERTED, cut, faults=(Fault(shard, 5, 9),)) != []


def test_a_match_without_an_answer_is_a_failure() -> None:
    assert wrong(INSERTED, asked(3, 4, 0, complete=False, failed="no answer")) == ["failed match"]


def test_faults_of_a_seed_are_always_the_same_ones() -> None:
    first, again, other = (
        [str(blow) for blow, _ in zip(blows(seed, 3, 2), range(200), strict=False)] for seed in (1, 1, 2)
    )
    assert first == again != other
    kinds = {(blow.partition(" ")[0], "stopped" in blow) for blow in first}
    shards = {(f"shard-{number}", stopped) for number in range(3) for stopped in (False, True)}
    rest = {("coordinator", False), ("coordinator", True), ("router-0", False), ("router-1", False)}
    assert kinds == shards | rest
