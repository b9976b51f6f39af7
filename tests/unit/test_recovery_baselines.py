"""What the recovery benchmark compares with comes back with all that it saved, or says that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.bulk_load import template_of
from bench.recovery import measure, sizes
from bench.scale.contestants import Contestant, Ours, all_contestants, drop_page_cache
from bench.scale.report import draw, table
from bench.scale.template import Template

REPLICAS = 3
NO_SLOT = 1
CONTESTANTS = {contestant.name: contestant for contestant in all_contestants()}


@pytest.fixture(scope="module", params=["trace", "skewed"])
def template(request: pytest.FixtureRequest) -> Template:
    return template_of(request.param, limit=40)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_each_contestant_answers_for_the_last_replica_and_for_no_further_one(
    name: str, template: Template, tmp_path: Path
) -> None:
    contestant = CONTESTANTS[name]
    reason = contestant.missing()
    if reason is not None:
        pytest.skip(reason)
    contestant.prepare(tmp_path, template, REPLICAS)
    measured = contestant.start(tmp_path, template, REPLICAS)
    assert 0 < measured["open_s"] <= measured["process_s"]
    assert measured["resident_bytes"] > 1 << 20
    if name.startswith("Redis"):
        return  # it would wait for what is missing, as long as it loads
    if not isinstance(contestant, Ours):
        (tmp_path / "query").unlink()
        question = template.internal_query(0, REPLICAS)
        (tmp_path / "query").write_bytes(np.array([len(question), NO_SLOT], "<u8").tobytes() + question.tobytes())
    with pytest.raises(SystemExit, match=r"not in the index|were found again"):
        contestant.start(tmp_path, template, REPLICAS + 1)


def test_who_cannot_hold_a_size_is_measured_at_the_largest_it_can() -> None:
    contestant = Ours("one", 1e7)
    assert sizes(contestant, [1e6, 1e7, 1e8, 1e9]) == [1e6, 1e7]
    assert sizes(contestant, [1e9]) == [1e7]


def test_rows_say_what_was_measured(template: Template, tmp_path: Path) -> None:
    rows = list(measure(Ours("SARP", 1e9), tmp_path, template, 2 * template.blocks, rounds=2))
    assert [row["cache"].rstrip("?") for row in rows] == ["cold", "warm"]
    assert all(row["blocks"] >= 2 * template.blocks - template.shared_blocks for row in rows)
    assert all(row["disk_bytes"] > 8 * template.blocks for row in rows)
    assert all(row["snapshot_bytes"] < row["disk_bytes"] for row in rows)
    assert isinstance(drop_page_cache(tmp_path), bool)


def row(contestant: str, blocks: int, cache: str, seconds: float) -> dict[str, Any]:
    return {
        "shape": "trace", "contestant": contestant, "blocks": blocks, "segments": blocks // 32, "cache": cache,
        "open_s": seconds, "process_s": seconds + 1, "resident_bytes": 5_000_000,
        "snapshot_bytes": 3 * blocks, "disk_bytes": 4 * blocks,
    }  # fmt: skip


ROWS = [
    row("SARP", 10**8, "cold", 0.5),
    row("SARP", 10**8, "warm", 0.25),
    row("SARP", 10**9, "cold", 2.0),
    row("other", 10**7, "cold", 1.0),
    row("other", 10**8, "cold", 30.0),
    row("other", 10**8, "cold?", 25.0),
]


def test_the_table_marks_what_was_scaled_and_what_was_not_cold() -> None:
    lines = table(ROWS).splitlines()
    assert lines[2:] == [
        "| trace | SARP | 3.00 | 4.0 | 0.0 |  |  | 0.500 / 0.250 | 2.00 / - | 1.00 |  |",
        "| trace | other | 3.00 | 4.0 | 0.1 |  | 1.00 / - | 25.0? / - | ≈ 250? / - (scaled from 1e8) | 1.00 | "
        "50 at 1e8 |",
    ]


def test_the_same_rows_give_the_same_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is absent")
    for name in ("one.svg", "two.svg"):
        draw(ROWS, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"<svg" in (tmp_path / "one.svg").read_bytes()


def test_contestants_have_names_of_their_own() -> None:
    assert len(CONTESTANTS) == len(all_contestants())
    assert all(isinstance(contestant, Contestant) for contestant in CONTESTANTS.values())
