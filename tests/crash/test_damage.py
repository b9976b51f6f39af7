"""Damage to any file of a store: answers may become shorter, or the store is refused by name. No answer is ever wrong.

The files are those that stand in the directory of a small store, of whatever kind. Sampled on each run; `make chaos`
tries every byte.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import pytest

from sarp_cluster.config import IndexConfig
from tests.crash.damage import (
    REFUSED,
    SAME,
    SHORTER,
    Damage,
    Original,
    deletions,
    flips,
    pages,
    record_swaps,
    records,
    swaps,
    truncations,
)
from tests.crash.test_bite import checksum_skipped
from tests.golden.store_directory import CONFIG

SHARES = 8
SAMPLED = 8
"""Damages of one kind that are tried in one file on each run."""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A store of several small log files."""
    return Original(tmp_path_factory.mktemp("several") / "store", CONFIG)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A store whose log is one file of several pages."""
    return Original(tmp_path_factory.mktemp("single") / "store", IndexConfig(segment_blocks=8))


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A store with two snapshots: manifests and runs."""
    config = dataclasses.replace(CONFIG, reclaim_ratio=None)
    original = Original(tmp_path_factory.mktemp("snapshots") / "store", config, snapshots_after=(15, 30))
    kinds = Counter(path.name.split("-")[0] for path in original.files())
    assert kinds["manifest"] == 2
    assert kinds["run"] >= 2
    return original


def sampled(damages: Iterable[Damage], count: int = SAMPLED) -> list[Damage]:
    everything = list(damages)
    return random.Random(len(everything)).sample(everything, min(count, len(everything)))


def outcomes(original: Original, damages: Iterable[Damage], tmp_path: Path) -> Counter[str]:
    """How often each outcome came about. A failure names the damage."""
    return Counter(original.outcome(damage, tmp_path / "damaged") for damage in damages)


def all_truncations(original: Original) -> Iterator[tuple[Path, Iterator[Damage]]]:
    for path in original.files():
        yield path, truncations(path, is_last=path == original.logs()[-1])


def test_an_undamaged_store_answers_as_ever(several: Original, single: Original, tmp_path: Path) -> None:
    nothing = Damage("none", lambda store: None)
    assert outcomes(several, [nothing], tmp_path) == outcomes(single, [nothing], tmp_path) == {SAME: 1}
    assert len(several.files()) > 3
    assert max(path.stat().st_size for path in single.files()) > 2 * 4_096


def test_some_bytes_flipped(several: Original, tmp_path: Path) -> None:
    damages = chain.from_iterable(sampled(flips(path)) for path in several.files())
    found = outcomes(several, damages, tmp_path)
    assert found[REFUSED]


def part(damages: Iterable[Damage], share: int) -> Iterator[Damage]:
    """Of the shares into which many are divided, so that they can run in parallel."""
    return islice(damages, share, None, SHARES)


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_byte_flipped(several: Original, tmp_path: Path, share: int) -> None:
    damages = chain.from_iterable(flips(path) for path in several.files())
    found = outcomes(several, part(damages, share), tmp_path)
    assert found[REFUSED] > found[SHORTER] > 0


def test_some_truncations(several: Original, tmp_path: Path) -> None:
    damages = chain.from_iterable(sampled(cut) for _, cut in all_truncations(several))
    outcomes(several, damages, tmp_path)


def test_the_last_record_cut_off(several: Original, tmp_path: Path) -> None:
    """The group that ends the last file: what it vouches for was durable before."""
    path = several.logs()[-1]
    cut = truncations(path, is_last=True)
    begin, end = records(path)[-1]
    found = outcomes(several, islice(cut, 0, end - begin, 3), tmp_path)
    assert not found[REFUSED]


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
def test_every_truncation_of_the_last_two_records(several: Original, tmp_path: Path) -> None:
    for path, cut in all_truncations(several):
        last_two = records(path)[-2:]
        length = last_two[-1][1] - last_two[0][0] if last_two else path.stat().st_size
        damages = [*islice(cut, length), *sampled(cut, 100)]
        outcomes(several, damages, tmp_path)


def test_each_file_gone(several: Original, tmp_path: Path) -> None:
    found = outcomes(several, deletions(several), tmp_path)
    assert found[REFUSED]


def test_two_files_swapped(several: Original, tmp_path: Path) -> None:
    found = outcomes(several, swaps(several.files()), tmp_path)
    assert found[REFUSED]
    assert not found[SAME]


def test_pages_that_are_zeros_or_that_of_another(single: Original, tmp_path: Path) -> None:
    damages = chain.from_iterable(pages(path) for path in single.files())
    found = outcomes(single, damages, tmp_path)
    assert found[REFUSED]
    assert not found[SAME]


def test_some_records_swapped(several: Original, single: Original, tmp_path: Path) -> None:
    for original in (several, single):
        damages = chain.from_iterable(sampled(record_swaps(path)) for path in original.files())
        assert outcomes(original, damages, tmp_path)[REFUSED]


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", range(SHARES))
def test_all_records_swapped(several: Original, tmp_path: Path, share: int) -> None:
    damages = chain.from_iterable(record_swaps(path) for path in several.files())
    outcomes(several, part(damages, share), tmp_path)


# --- snapshots: the log has the same, and more ------------------------------------------------------------------------


def of_snapshots(original: Original) -> list[Path]:
    return [path for path in original.files() if path.name.startswith(("manifest-", "run-"))]


def test_some_damage_to_snapshots(snapshots: Original, tmp_path: Path) -> None:
    files = of_snapshots(snapshots)
    cut = chain.from_iterable(sampled(truncations(path, is_last=False), 4) for path in files)
    damages = [*chain.from_iterable(sampled(flips(path)) for path in files), *cut]
    damages += [damage for damage in deletions(snapshots) if damage.what.startswith(("manifest-", "run-"))]
    assert outcomes(snapshots, damages, tmp_path) == {SAME: len(damages)}


def test_files_of_snapshots_swapped_with_others(snapshots: Original, tmp_path: Path) -> None:
    files = of_snapshots(snapshots)
    assert set(outcomes(snapshots, swaps(files), tmp_path)) == {SAME}
    outcomes(snapshots, sampled(swaps([*files, *snapshots.logs()]), 12), tmp_path)


def test_damage_to_the_log_behind_a_snapshot(snapshots: Original, tmp_path: Path) -> None:
    damages = chain.from_iterable(sampled(flips(path), 4) for path in snapshots.logs())
    outcomes(snapshots, damages, tmp_path)


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_byte_of_snapshots_flipped(snapshots: Original, tmp_path: Path, share: int) -> None:
    damages = list(part(chain.from_iterable(flips(path) for path in of_snapshots(snapshots)), share))
    assert outcomes(snapshots, damages, tmp_path) == {SAME: len(damages)}


@pytest.mark.chaos
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_byte_of_the_log_behind_a_snapshot_flipped(snapshots: Original, tmp_path: Path, share: int) -> None:
    damages = chain.from_iterable(flips(path) for path in snapshots.logs())
    outcomes(snapshots, part(damages, share), tmp_path)


def test_a_checksum_that_is_skipped_would_be_found(
    several: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum_skipped(monkeypatch)
    damages = chain.from_iterable(flips(path) for path in several.files())
    with pytest.raises(AssertionError, match=r"it answers what it never did|names segment"):
        outcomes(several, sampled(damages, 400), tmp_path)
