"""Which log file is reclaimed next, how fast, which records are in force, and when a file may be closed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster.storage.reclaim import (
    EARLY_CLOSE_PARTS,
    LIVE_SHARE_MAX,
    PRESSED_SHARE_MAX,
    LogFile,
    Pace,
    ReadEpochs,
    RecordsInForce,
    Situation,
    choose,
)

FILE_BYTES = 1_000
RATIO = 1.4
SITUATION = Situation(RATIO, FILE_BYTES)
HEADER = 50


def file(number: int, useful: int, size: int = FILE_BYTES) -> LogFile:
    return LogFile(number, size, HEADER, useful)


def ratio(files: list[LogFile]) -> float:
    return sum(each.bytes for each in files) / sum(each.useful_bytes + each.header_bytes for each in files)


# --- which ------------------------------------------------------------------------------------------------------------


def test_nothing_is_chosen_of_full_files() -> None:
    assert choose([], SITUATION) is None
    assert choose([file(1, 900), file(2, 950), file(3, 10, 60)], SITUATION) is None


def test_a_wholly_dead_file_goes_first() -> None:
    assert choose([file(1, 100), file(2, 0), file(3, 900)], SITUATION) == 2


def test_the_file_with_the_least_useful_share_is_next() -> None:
    assert choose([file(1, 400), file(2, 300), file(3, 900)], SITUATION) == 2


def test_a_file_of_which_half_is_useful_is_worth_it_at_any_ratio() -> None:
    files = [file(n, 940) for n in range(1, 10)]
    assert ratio(files) < RATIO
    assert choose([*files, file(10, 449), file(11, 940)], SITUATION) == 10
    assert choose([*files, file(10, 451), file(11, 940)], SITUATION) is None


def test_over_the_ratio_a_file_below_its_share_is_chosen() -> None:
    files = [file(1, 600), file(2, 650), file(3, 600), file(4, 700)]
    assert ratio(files) > RATIO
    assert choose(files, SITUATION) == 1


def test_the_open_file_is_chosen_when_the_dead_bytes_are_in_it() -> None:
    files = [file(1, 940), file(2, 940), file(3, 100)]
    assert choose(files, SITUATION) == 3
    few = FILE_BYTES // EARLY_CLOSE_PARTS - 1
    small = [LogFile(1, few + 1, 0, 1)]
    assert ratio(small) > RATIO
    assert choose(small, SITUATION) is None


def test_what_a_snapshot_needs_is_left() -> None:
    files = [file(1, 900), file(2, 0), file(3, 100), file(4, 0)]
    assert choose(files, SITUATION._replace(oldest_needed=2)) == 4, "closed, so that it can go with the snapshot"
    assert choose(files, SITUATION._replace(oldest_needed=3)) == 2
    assert choose(files[2:], SITUATION._replace(oldest_needed=4)) == 3
    assert choose(files[3:], SITUATION._replace(oldest_needed=4)) == 4


def test_what_was_passed_over_is_left() -> None:
    assert choose([file(1, 0), file(2, 100), file(3, 900)], SITUATION, {1}) == 2


def test_what_does_not_fit_is_not_begun() -> None:
    files = [file(1, 400), file(2, 450), file(3, 900)]
    assert choose(files, SITUATION._replace(free_bytes=399)) is None
    assert choose(files, SITUATION._replace(free_bytes=400)) == 1
    assert choose([*files, file(4, 0), file(5, 900)], SITUATION._replace(free_bytes=0)) == 4


def test_on_a_full_disk_more_is_rewritten() -> None:
    files = [file(n, 740) for n in range(1, 10)]
    assert ratio(files) < RATIO
    assert choose(files, SITUATION) is None
    assert choose(files, SITUATION._replace(pressed=True)) == 1
    assert choose([file(1, 760), file(2, 760)], SITUATION._replace(pressed=True)) is None


@given(
    st.lists(st.tuples(st.integers(1, 1_000), st.floats(0, 1)), min_size=1, max_size=8),
    st.sampled_from((None, 1, 3, 100)),
    st.sampled_from((None, 0, 300, 10_000)),
    st.booleans(),
)
def test_a_choice_is_allowed_and_repeated_choices_end_below_the_ratio(
    drawn: list[tuple[int, float]], oldest_needed: int | None, free_bytes: int | None, pressed: bool
) -> None:
    """Whatever is chosen is rewritten without its dead bytes: at the end nothing is left to do, and that is enough."""
    files = [LogFile(n, size, 0, int(size * share)) for n, (size, share) in enumerate(drawn, 1)]
    situation = Situation(RATIO, FILE_BYTES, oldest_needed, free_bytes, pressed)
    for _ in range(100):
        number = choose(files, situation)
        if number is None:
            break
        chosen = next(each for each in files if each.number == number)
        assert chosen.useful_bytes <= PRESSED_SHARE_MAX * chosen.bytes
        if chosen is files[-1]:
            files.append(LogFile(number + 1, 1, 0, 1))
            continue
        assert oldest_needed is None or number < oldest_needed
        assert free_bytes is None or chosen.useful_bytes <= free_bytes
        files = [each for each in files if each.number != number]
        files.append(
            LogFile(files[-1].number + 1 if files else number + 1, chosen.useful_bytes, 0, chosen.useful_bytes)
        )
        files = [each for each in files if each.bytes]
    else:
        raise AssertionError("no end")
    if oldest_needed is None and free_bytes is None and files:
        assert all(each.share > LIVE_SHARE_MAX for each in files[:-1])
        dead = files[-1].bytes - files[-1].useful_bytes
        useful = sum(each.useful_bytes for each in files)
        assert sum(each.bytes for each in files) <= RATIO * useful or dead < FILE_BYTES // EARLY_CLOSE_PARTS


# --- how fast ---------------------------------------------------------------------------------------------------------


def test_a_pace_is_kept_over_time() -> None:
    pace, now, spent = Pace(1_000), 100.0, 0
    pace.earn(now, 0)
    while now < 200:
        pace.earn(now, 0)
        if pace.wait_s == 0:
            pace.spend(70)
            spent += 70
        now += max(pace.wait_s, 0.001)
    assert 0.95 * 100_000 <= spent <= 1.05 * 100_000


def test_who_did_nothing_for_long_may_not_do_it_all_at_once() -> None:
    pace = Pace(1_000)
    pace.earn(0, 0)
    pace.earn(10_000, 0)
    pace.spend(1_000)
    assert pace.wait_s > 0.7


def test_what_the_foreground_appends_is_kept_up_with() -> None:
    pace = Pace(1_000)
    pace.earn(0, 0)
    for hundredth in range(1, 10_000):
        pace.earn(hundredth / 100, hundredth * 500)
        pace.spend(6 * 500)  # what it costs to gain as much
        assert pace.wait_s < 3


# --- which records are in force ---------------------------------------------------------------------------------------


def test_the_newest_record_is_the_one_in_force() -> None:
    records = RecordsInForce()
    assert not records.stands_elsewhere(4, 7, 1)  # of what was recovered nothing is known
    records.put(4, 7, file=1, payload_bytes=10)
    assert records.bytes_in(1) == 48
    assert not records.stands_elsewhere(4, 7, 1)
    assert records.stands_elsewhere(4, 7, 2)
    records.put(4, 7, file=3, payload_bytes=9)
    assert (records.bytes_in(1), records.bytes_in(3)) == (0, 48)
    assert records.stands_elsewhere(4, 7, 1)
    assert not records.stands_elsewhere(5, 7, 1)
    assert not records.stands_elsewhere(4, 100_000, 1)


@given(st.lists(st.tuples(st.sampled_from((3, 4, 5)), st.integers(0, 9), st.integers(1, 5), st.integers(1, 600))))
def test_bytes_in_force_are_exact(puts: list[tuple[int, int, int, int]]) -> None:
    records, newest = RecordsInForce(), {}
    for kind, number, at, size in puts:
        records.put(kind, number, at, size)
        newest[kind, number] = (at, (32 + size + 7) // 8 * 8)
    for at in range(1, 6):
        assert records.bytes_in(at) == sum(size for where, size in newest.values() if where == at)
        for (kind, number), (where, _) in newest.items():
            assert records.stands_elsewhere(kind, number, at) == (where != at)


# --- when a file may be closed ----------------------------------------------------------------------------------------


def test_a_file_that_nobody_reads_is_closed_at_once() -> None:
    epochs = ReadEpochs()
    epochs.end(epochs.begin())
    epochs.retire(1)
    assert epochs.unread() == [1]
    assert epochs.unread() == []


def test_a_read_keeps_what_was_retired_after_it_began() -> None:
    epochs = ReadEpochs()
    first = epochs.begin()
    epochs.retire(1)
    second = epochs.begin()  # nothing points to file 1 any more
    epochs.retire(2)
    assert epochs.unread() == []
    epochs.end(first)
    assert epochs.unread() == [1]
    epochs.end(second)
    assert epochs.unread() == [2]


@given(st.lists(st.sampled_from(("begin", "end", "retire", "close")), max_size=60), st.randoms())
def test_no_file_is_closed_under_a_read_that_may_want_it(events: list[str], rng: object) -> None:
    epochs, standing, numbers = ReadEpochs(), set(range(100)), iter(range(100))
    reads: list[tuple[int, frozenset[int]]] = []
    for event in [*events, "close"]:
        if event == "begin":
            reads.append((epochs.begin(), frozenset(standing)))
        elif event == "end" and reads:
            epochs.end(reads.pop(rng.randrange(len(reads)))[0])  # type: ignore[attr-defined]
        elif event == "retire":
            number = next(numbers)
            standing.discard(number)
            epochs.retire(number)
        elif event == "close":
            for closed in epochs.unread():
                assert all(closed not in wanted for _, wanted in reads)
    for read, _ in reads:
        epochs.end(read)
    epochs.unread()
    assert not epochs._retired
