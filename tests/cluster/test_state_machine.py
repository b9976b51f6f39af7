"""The coordinator's decisions: leases, states, the first map, starting and killing, snapshots in turn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.instructions import (
    DrainShard,
    FetchView,
    GrantLease,
    Install,
    Instruction,
    KeepRecord,
    KillShard,
    MakeFirstMap,
    Note,
    PublishMap,
    Refuse,
    StartShard,
    TakeSnapshot,
)
from coordinator.state_machine import KILL_AGAIN_S, SILENT_S, StateMachine
from coordinator.tracked_shard import InvalidTransitionError, TrackedShard
from sarp_cluster import limits
from sarp_cluster.cluster.membership import ShardRecord
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.errors import BadRequestError, InvariantViolationError
from sarp_cluster.wire.messages import ShardState
from tests.cluster.machine_driver import NONCE, Driver, report

T = TypeVar("T")
DUE = limits.SNAPSHOT_DUE_LOG_BYTES
SUPERVISED = ("s0", "s1", "s2")


def of(kind: type[T], out: list[Instruction]) -> list[T]:
    return [one for one in out if isinstance(one, kind)]


def kinds(out: list[Instruction]) -> list[str]:
    return [one.kind for one in of(Note, out)]


def driver(*, expected: int = 1, managed: tuple[str, ...] = SUPERVISED, **more: object) -> Driver:
    return Driver(StateMachine(0.0, expected=expected, managed=managed, **more))  # type: ignore[arg-type]


def serving(count: int = 1, **more: object) -> Driver:
    """Shards that serve under a published map."""
    one = driver(expected=count, **more)  # type: ignore[arg-type]
    names = SUPERVISED[:count]
    for name in names:
        one.heartbeat(report(name))
    one.make_map(names)
    for name in names:
        one.install(name)
        one.heartbeat(report(name, state="serving", epoch=1))
    assert [one.state(name) for name in names] == ["serving"] * count
    return one


def go_down(one: Driver, name: str = "s0") -> list[Instruction]:
    """Silence, and failing probes."""
    one.wait(SILENT_S + 0.1)
    out: list[Instruction] = []
    for _ in range(limits.PROBES_FAILED_MAX):
        out += one.probe(name, answered=False)
    return out


# --- joining ----------------------------------------------------------------------------------------------------------


def test_the_first_map_is_made_once_when_all_that_are_expected_have_joined() -> None:
    one = driver(expected=3)
    assert not of(MakeFirstMap, one.heartbeat(report("s0")))
    assert not of(MakeFirstMap, one.heartbeat(report("s0")))
    assert not of(MakeFirstMap, one.heartbeat(report("s2")))
    assert of(MakeFirstMap, one.heartbeat(report("s1"))) == [MakeFirstMap(SUPERVISED)]
    assert not of(MakeFirstMap, one.heartbeat(report("s1")))
    one.map_pending = False
    one.machine.map_failed()  # the disk was full
    assert of(MakeFirstMap, one.wait(0.1)) == [MakeFirstMap(SUPERVISED)]
    out = one.make_map()
    assert of(Install, out) == [Install(name) for name in SUPERVISED]
    assert [one.state(name) for name in SUPERVISED] == ["joining"] * 3


def test_a_shard_that_is_not_heard_any_more_is_not_in_the_first_map() -> None:
    one = driver(expected=2)
    one.heartbeat(report("s0"))
    one.wait(SILENT_S + 1)
    assert not of(MakeFirstMap, one.heartbeat(report("s1")))
    assert of(MakeFirstMap, one.heartbeat(report("s0"))) == [MakeFirstMap(("s0", "s1"))]


def test_no_first_map_is_made_where_a_shard_has_one_already() -> None:
    """The coordinators' records are lost: what the shards know is taken over."""
    one = driver(expected=2)
    out = one.heartbeat(report("s0", state="serving", epoch=7, number=3))
    assert of(FetchView, out) == [FetchView("s0")]
    assert of(GrantLease, out)
    out = one.heartbeat(report("s1"))
    assert not of(MakeFirstMap, out)
    known = SlotMap(epoch=7, nonce=NONCE, shards=["s0", "s1"], owners=[0, 1] * 2048, splits={})
    one.made = known
    out = one.check(one.machine.map_made(known, one.now))
    assert of(Install, out) == [Install("s1")]
    assert not of(PublishMap, out)  # one of two is no majority
    assert of(PublishMap, one.install("s1")) == [PublishMap(7)]


def test_a_map_is_published_when_a_majority_of_its_shards_has_it() -> None:
    one = driver(expected=3)
    for name in SUPERVISED:
        one.heartbeat(report(name))
    one.make_map()
    assert not of(PublishMap, one.install("s0"))
    assert not of(PublishMap, one.install("s0"))
    out = one.heartbeat(report("s2", epoch=1))  # a heartbeat tells as well as the answer to an install
    assert of(PublishMap, out) == [PublishMap(1)]
    assert not of(PublishMap, one.install("s1"))
    one.make_map()
    assert one.machine.published == 1
    one.install("s0")
    assert of(PublishMap, one.install("s1")) == [PublishMap(2)]


def test_after_a_restart_of_the_coordinator_a_map_is_published_again_only_when_most_shards_tell_of_it() -> None:
    records = {
        name: ShardRecord(shard=name, store=f"directory of {name}", incarnation=f"{name}-p1", http="", stream="a:1")
        for name in SUPERVISED
    }
    one = driver(expected=3, records=records, slot_map=SlotMap.first(SUPERVISED, NONCE))
    assert one.machine.published == 0
    one.heartbeat(report("s0", state="serving", epoch=1))
    assert of(PublishMap, one.heartbeat(report("s1", state="serving", epoch=1))) == [PublishMap(1)]


def test_a_shard_that_lacks_something_is_given_it() -> None:
    one = serving(2)
    one.machine.changed(5)
    assert of(Install, one.heartbeat(report("s0", state="serving", epoch=1, number=4))) == [Install("s0")]
    assert not of(Install, one.heartbeat(report("s0", state="serving", epoch=1, number=5)))
    out = one.heartbeat(report("s1", state="serving", epoch=1, number=6))
    assert of(FetchView, out) == [FetchView("s1")]
    assert of(Install, one.heartbeat(report("late"))) == [Install("late")]


def test_a_shard_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARDS_MAX", 2)
    one = driver(managed=())
    one.heartbeat(report("a"))
    one.heartbeat(report("b"))
    assert of(Refuse, one.heartbeat(report("c"))) == [Refuse("c", "c-p1", "too_many")]


# --- leases and identity ----------------------------------------------------------------------------------------------


def test_another_directory_under_the_same_name_is_refused_and_told_once() -> None:
    one = serving()
    for _ in range(3):
        out = one.heartbeat(report(store="a copy", incarnation="p9", state="serving", epoch=1))
        assert of(Refuse, out) == [Refuse("s0", "s0-p9", "identity_clash")]
    assert kinds(one.last) == []
    assert one.machine.shards["s0"].holder == "s0-p1"
    go_down(one)
    assert of(Refuse, one.heartbeat(report(store="a copy", incarnation="p9")))  # not even then


def test_another_incarnation_of_the_same_directory_takes_over_at_once() -> None:
    one = serving()
    out = one.heartbeat(report(incarnation="p2", epoch=1))
    assert of(GrantLease, out) == [GrantLease("s0", "s0-p2", limits.LEASE_MS)]
    assert [kept.record.incarnation for kept in of(KeepRecord, out)] == ["s0-p2"]
    assert one.state() == "recovering"
    assert one.machine.shards["s0"].holder == "s0-p2"


def test_a_late_word_of_a_process_that_is_gone_is_refused() -> None:
    one = serving()
    one.heartbeat(report(incarnation="p2", state="serving", epoch=1))
    out = one.heartbeat(report(incarnation="p1", state="serving", epoch=1))
    assert of(Refuse, out) == [Refuse("s0", "s0-p1", "superseded")]
    assert one.machine.shards["s0"].holder == "s0-p2"


def test_an_incarnation_that_was_taken_for_gone_is_believed_when_the_other_is_silent() -> None:
    """A word of an older process came late to a coordinator that had just begun."""
    one = serving()
    one.heartbeat(report(incarnation="p2", state="serving", epoch=1))
    one.wait(SILENT_S + 0.1)
    assert of(GrantLease, one.heartbeat(report(incarnation="p1", state="serving", epoch=1)))
    assert of(Refuse, one.heartbeat(report(incarnation="p2", state="serving", epoch=1)))


def test_of_two_processes_with_one_identity_neither_gets_a_lease_until_one_is_gone() -> None:
    """Somebody copied the directory: the lock of the one says nothing about the other."""

    def beat(incarnation: str) -> list[Instruction]:
        return one.heartbeat(report(incarnation=incarnation, state="serving", epoch=1))

    one = serving()
    told: list[str] = []
    for _ in range(10):
        told += kinds(beat("p2")) + kinds(beat("p1"))
        one.wait(1)
    assert told.count("identity_clash") == 1
    assert of(Refuse, beat("p1")) + of(Refuse, beat("p2")) == [
        Refuse("s0", "s0-p1", "identity_clash"),
        Refuse("s0", "s0-p2", "identity_clash"),
    ]
    assert one.state() == "suspect"
    one.wait(limits.LEASE_MS / 1000 - 1)
    assert of(Refuse, beat("p1"))
    one.wait(1)
    assert of(GrantLease, beat("p1"))  # p2 is gone, and so is whatever lease it had
    assert one.state() == "serving"


def test_another_map_of_the_same_number_gets_no_lease() -> None:
    one = serving()
    out = one.heartbeat(report(state="serving", epoch=1, nonce=bytes(16)))
    assert of(Refuse, out) == [Refuse("s0", "s0-p1", "epoch_conflict")]
    assert kinds(out) == ["epoch_conflict"]
    assert kinds(one.heartbeat(report(state="serving", epoch=1, nonce=bytes(16)))) == []


def test_suspicion_takes_no_lease_away_and_time_does() -> None:
    one = serving()
    go_down(one)
    shard = one.machine.shards["s0"]
    assert (one.state(), shard.holder) == ("down", "s0-p1")
    one.wait(limits.LEASE_MS / 1000)
    assert shard.holder is None


def test_a_new_coordinator_takes_leases_of_the_one_before_for_granted() -> None:
    record = ShardRecord(shard="s0", store="directory of s0", incarnation="s0-p1", http="", stream="a:1")
    one = driver(records={"s0": record})
    shard = one.machine.shards["s0"]
    assert (shard.holder, shard.lease_end) == ("s0-p1", limits.LEASE_MS / 1000)
    assert of(Refuse, one.heartbeat(report(store="a copy")))
    assert not of(KeepRecord, one.heartbeat(report(incarnation="p1", stream="a:1")))  # it is known


# --- health -----------------------------------------------------------------------------------------------------------


def test_a_shard_goes_through_its_states() -> None:
    one = driver()
    one.heartbeat(report())
    assert one.state() == "joining"
    one.make_map(["s0"])
    one.install("s0")
    assert one.state() == "recovering"
    one.heartbeat(report(state="serving", epoch=1))
    assert one.state() == "serving"
    one.heartbeat(report(state="recovering", epoch=1))  # it was away, and fetches what it lacks
    one.heartbeat(report(state="serving", epoch=1))
    one.heartbeat(report(state="draining", epoch=1))
    assert one.state() == "draining"
    assert [step.after for step in one.machine.shards["s0"].story] == [
        "joining",
        "recovering",
        "serving",
        "recovering",
        "serving",
        "draining",
    ]


def test_what_drains_does_not_serve_again_whatever_comes_late() -> None:
    one = serving()
    one.heartbeat(report(state="draining", epoch=1))
    one.heartbeat(report(state="serving", epoch=1))
    assert one.state() == "draining"
    one.heartbeat(report(state="serving", epoch=1, incarnation="p2"))
    assert one.state() == "serving"


def test_a_late_word_from_before_the_map_does_not_bring_joining_back() -> None:
    one = serving()
    one.heartbeat(report())
    assert one.state() == "recovering"
    assert one.machine.shards["s0"].epoch == 1


def test_a_failed_probe_makes_suspect_and_an_answer_makes_well() -> None:
    one = serving()
    one.probe("s0", answered=False)
    assert one.state() == "suspect"
    one.heartbeat(report(state="serving", epoch=1))
    assert one.state() == "suspect"  # heard, but it does not answer
    one.probe("s0", answered=True)
    assert one.state() == "serving"


def test_a_shard_that_is_heard_is_never_down_however_many_probes_fail() -> None:
    one = serving()
    for _ in range(20):
        one.probe("s0", answered=False)
        one.wait(0.5)
        one.heartbeat(report(state="serving", epoch=1))
    assert one.state() == "suspect"


def test_silence_alone_makes_suspect() -> None:
    one = serving()
    one.wait(SILENT_S)
    assert one.state() == "serving"
    one.wait(0.1)
    assert one.state() == "suspect"
    for _ in range(100):
        one.probe("s0", answered=True)
        one.wait(1)
    assert one.state() == "suspect"


def test_a_stopped_process_is_killed_after_suspect_and_down_and_started_when_it_has_ended() -> None:
    one = serving()
    out = go_down(one)
    assert one.state() == "down"
    assert of(KillShard, out) == [KillShard("s0")]
    assert not of(StartShard, out)  # it may still have the lock
    assert not of(KillShard, one.wait(KILL_AGAIN_S - 1))
    assert of(KillShard, one.wait(1)) == [KillShard("s0")]  # it does not end: again
    assert of(StartShard, one.exit("s0", 101)) == [StartShard("s0")]
    assert not of(KillShard, one.wait(KILL_AGAIN_S))
    one.heartbeat(report(incarnation="p2", epoch=1))
    assert one.state() == "recovering"


def test_one_that_comes_back_by_itself_before_it_is_killed_is_well() -> None:
    one = serving()
    go_down(one)
    one.heartbeat(report(state="serving", epoch=1))
    assert one.state() == "suspect"  # the probes since have failed
    one.probe("s0", answered=True)
    assert one.state() == "serving"
    assert not of(KillShard, one.wait(1))


def test_a_process_that_ended_is_started_again_at_once() -> None:
    one = serving()
    out = one.exit("s0", 101)
    assert of(StartShard, out) == [StartShard("s0")]
    assert one.state() == "down"
    assert one.machine.shards["s0"].holder is None
    assert of(StartShard, one.exit("s0", 555)) == [StartShard("s0")]  # it ended before it was heard
    one.heartbeat(report(incarnation="p2", epoch=1))
    out = one.exit("s0", 101)  # told twice, late
    assert not of(StartShard, out)
    assert one.state() == "recovering"


def test_a_shard_that_is_not_ours_is_neither_started_nor_killed() -> None:
    one = driver(managed=())
    one.heartbeat(report())
    one.make_map(["s0"])
    one.heartbeat(report(state="serving", epoch=1))
    out = go_down(one)
    assert one.state() == "down"
    assert not of(KillShard, out)
    assert one.exit("s0", 101) == []


def test_slots_of_a_silent_shard_stay_with_it() -> None:
    one = serving(3)
    before = one.machine.slot_map
    for name in SUPERVISED:
        go_down(one, name)
    one.wait(1e6)
    assert one.machine.slot_map is before


def test_a_shard_from_the_records_that_is_not_heard_becomes_suspect_and_down() -> None:
    record = ShardRecord(shard="s0", store="directory of s0", incarnation="s0-p1", http="", stream="a:1")
    one = driver(managed=(), records={"s0": record})
    one.probe("s0", answered=False)
    assert one.state() == "joining"  # there was no time for it yet
    one.wait(SILENT_S + 0.1)
    assert one.state() == "suspect"
    one.probe("s0", answered=False)
    one.probe("s0", answered=False)
    assert one.state() == "down"


def test_one_that_never_joined_is_waited_for() -> None:
    one = driver(expected=3)
    one.wait(1e6)
    assert one.state("s2") == "joining"


# --- operators and snapshots ------------------------------------------------------------------------------------------


def test_a_drained_shard_is_not_started_again_until_it_is_recovered() -> None:
    one = serving()
    assert of(DrainShard, one.check(one.machine.drain("s0", one.now))) == [DrainShard("s0")]
    one.heartbeat(report(state="draining", epoch=1))
    out = one.exit("s0", 101)
    assert not of(StartShard, out)
    assert "shard_drained" in kinds(out)
    assert of(StartShard, one.check(one.machine.recover("s0", one.now))) == [StartShard("s0")]


def test_one_that_was_drained_stays_so_for_the_next_coordinator() -> None:
    one = driver(drained=["s0"])
    assert not of(StartShard, one.exit("s0", 0))
    assert of(StartShard, one.exit("s1", 0)) == [StartShard("s1")]


def test_a_suspect_shard_is_recovered_by_ending_its_process() -> None:
    one = serving()
    one.wait(SILENT_S + 0.1)
    out = one.check(one.machine.recover("s0", one.now))
    assert of(KillShard, out) == [KillShard("s0")]
    assert one.check(one.machine.recover("s0", one.now)) == [Note("s0", "recover_asked", "by an operator")]
    assert of(StartShard, one.exit("s0", 101))


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda machine: machine.drain("nobody", 0.0), "none called 'nobody'"),
        (lambda machine: machine.snapshot("s1", 0.0), "none called 's1'"),
        (lambda machine: machine.recover("s0", 0.0), "is serving, there is nothing to recover"),
    ],
)
def test_what_an_operator_cannot_have_is_refused(ask: Callable[[StateMachine], object], why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        ask(serving().machine)


def test_a_shard_that_runs_elsewhere_cannot_be_recovered_from_here() -> None:
    one = driver(managed=())
    one.heartbeat(report())
    one.wait(SILENT_S + 0.1)
    with pytest.raises(BadRequestError, match="start it where it runs"):
        one.machine.recover("s0", one.now)


def test_snapshots_are_taken_in_turn_the_longest_log_first() -> None:
    one = serving(3)
    for name, log_bytes in zip(SUPERVISED, (DUE, 3 * DUE, DUE - 1), strict=True):
        one.heartbeat(report(name, state="serving", epoch=1, log_bytes=log_bytes))
    assert of(TakeSnapshot, one.wait(0.1)) == [TakeSnapshot("s1")]
    assert not of(TakeSnapshot, one.wait(0.1))
    assert kinds(one.snapshot_done("s1")) == ["snapshot_taken"]
    assert of(TakeSnapshot, one.wait(0.1)) == [TakeSnapshot("s0")]
    one.snapshot_done("s0")
    assert not of(TakeSnapshot, one.wait(0.1))  # what they reported was before


def test_an_old_snapshot_is_renewed_if_the_log_has_grown() -> None:
    one = serving(2)
    age = limits.SNAPSHOT_DUE_AGE_MS / 1000
    one.heartbeat(report("s0", state="serving", epoch=1, snapshot_age_s=age))
    one.heartbeat(report("s1", state="serving", epoch=1, snapshot_age_s=age, log_bytes=1))
    assert of(TakeSnapshot, one.wait(0.1)) == [TakeSnapshot("s1")]


def test_an_operator_goes_first_and_a_shard_that_does_not_answer_holds_nobody_up_for_ever() -> None:
    one = serving(2)
    one.heartbeat(report("s0", state="serving", epoch=1, log_bytes=DUE))
    assert of(TakeSnapshot, one.wait(0.1)) == [TakeSnapshot("s0")]
    assert one.check(one.machine.snapshot("s1", one.now)) == []
    one.now += limits.SNAPSHOT_TIMEOUT_MS / 1000 - 1
    one.heartbeat(report("s1", state="serving", epoch=1))
    one.now += 1
    one.probe("s1", answered=True)
    out = one.wait(0)
    assert kinds(out)[-1] == "snapshot_failed"
    assert of(TakeSnapshot, out) == [TakeSnapshot("s1")]
    assert one.snapshot_done("s0") == []  # too late


def test_after_a_failure_others_come_first() -> None:
    one = serving(2)
    for name in ("s0", "s1"):
        one.heartbeat(report(name, state="serving", epoch=1, log_bytes=DUE if name == "s0" else 2 * DUE))
    one.wait(0.1)
    assert kinds(one.snapshot_done("s1", "the disk is full")) == ["snapshot_failed"]
    assert of(TakeSnapshot, one.wait(0.1)) == [TakeSnapshot("s0")]


# --- anything may come, in any order ----------------------------------------------------------------------------------


def test_a_step_along_no_edge_is_a_bug_that_tells_the_shards_story() -> None:
    shard = TrackedShard("s0", 0.0, managed=True)
    states: list[ShardState] = ["recovering", "draining"]
    for time, state in enumerate(states):
        shard.move(state, "a test", float(time))
    with pytest.raises(InvalidTransitionError, match=r"draining -> serving.*joining -> recovering.*-> draining"):
        shard.move("serving", "a test", 2.0)


def test_validate_finds_what_is_wrong() -> None:
    one = serving()
    one.machine.shards["s0"].holder = "somebody"
    with pytest.raises(InvariantViolationError, match="C1"):
        one.machine.validate(one.now)


ALPHABET: dict[str, Callable[[Driver], object]] = {
    "serving": lambda one: one.heartbeat(report(state="serving", epoch=1)),
    "no map": lambda one: one.heartbeat(report()),
    "draining": lambda one: one.heartbeat(report(state="draining", epoch=1)),
    "next process": lambda one: one.heartbeat(report(state="recovering", epoch=1, incarnation="p2")),
    "another store": lambda one: one.heartbeat(report(store="a copy", incarnation="p3")),
    "other nonce": lambda one: one.heartbeat(report(epoch=1, nonce=bytes(16))),
    "answered": lambda one: one.probe("s0", answered=True),
    "failed": lambda one: [one.probe("s0", answered=False) for _ in range(2)],
    "exited": lambda one: one.exit("s0", 101),
    "wait": lambda one: one.wait(SILENT_S + 0.1),
}


def test_every_short_sequence_of_news_keeps_the_invariants() -> None:
    for mapped in (False, True):
        for names in product(ALPHABET, repeat=4):
            one = serving() if mapped else driver()
            for name in names:
                try:
                    ALPHABET[name](one)
                except BaseException as error:
                    error.add_note(f"after {names}, {'with' if mapped else 'without'} a map")
                    raise


SHARD_NAMES = st.sampled_from(SUPERVISED)
NEWS = st.one_of(
    st.tuples(
        st.just("heartbeat"),
        st.builds(
            report,
            SHARD_NAMES,
            store=st.sampled_from(["", "", "", "a copy"]),
            incarnation=st.sampled_from(["p1", "p1", "p2", "p3"]),
            state=st.sampled_from(["recovering", "serving", "draining"]),
            epoch=st.integers(0, 3),
            nonce=st.sampled_from([None, None, None, bytes(16)]),
            number=st.integers(0, 3),
            log_bytes=st.sampled_from([0, DUE]),
        ),
    ),
    st.tuples(st.just("probe"), SHARD_NAMES, st.booleans()),
    st.tuples(st.just("exit"), SHARD_NAMES, st.sampled_from([0, 101, 102, 555])),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 1.0, SILENT_S + 0.1, KILL_AGAIN_S, 61.0])),
    st.tuples(st.just("make_map")),
    st.tuples(st.just("install"), SHARD_NAMES),
    st.tuples(st.just("snapshot_done"), SHARD_NAMES, st.sampled_from([None, "failed"])),
    st.tuples(st.sampled_from(["drain", "recover", "snapshot"]), SHARD_NAMES),
)


@given(st.lists(NEWS, max_size=60), st.integers(1, 3), st.sets(SHARD_NAMES))
def test_any_sequence_of_news_keeps_the_invariants(
    news: list[tuple[object, ...]], expected: int, managed: set[str]
) -> None:
    one = driver(expected=expected, managed=tuple(managed))
    for kind, *rest in news:
        match kind, rest:
            case "probe", [str(name), bool(answered)]:
                one.probe(name, answered=answered)
            case "make_map", []:
                if one.machine.shards:
                    one.make_map()
            case "install", [str(name)]:
                if one.made is not None:
                    one.install(name)
            case (("drain" | "recover" | "snapshot"), [str(name)]):
                try:
                    one.check(getattr(one.machine, str(kind))(name, one.now))
                except BadRequestError:
                    pass  # refused, with nothing changed
                one.check([])
            case _:
                getattr(one, str(kind))(*rest)


def test_shards_of_a_map_whose_records_were_lost_may_be_answering_while_a_lease_of_before_may_last() -> None:
    machine = StateMachine(100.0, expected=3)
    known = SlotMap.first(["s0", "s1", "s2"], NONCE)
    machine.heartbeat(report("s0", epoch=1), 101.0)
    machine.heartbeat(report("s1", epoch=1), 101.0)
    machine.map_made(known, 102.0)
    assert machine.settled()
    assert machine.may_answer("s2")
    machine.validate(102.0)
    machine.tick(100.0 + limits.LEASE_MS / 1000)
    assert not machine.may_answer("s2")
    machine.heartbeat(report("s2", epoch=1), 170.0)
    assert machine.shards["s2"].store
    machine.validate(170.0)
