"""What bench.recovery measured, as a table and as a plot.

python -m bench.scale.report ROWS.json [PLOT.svg]     of rows that were kept with --json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scale.contestants import OURS

GOAL: Final = 1e9
SIZES: Final = (1e6, 1e7, 1e8, 1e9)
NEAR: Final = 1.5
"""Whole replicas make a size up to so many times larger than asked for."""
Row = dict[str, Any]


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of rows about the same, the last one."""
    return list({(row["shape"], row["contestant"], row["blocks"], row["cache"][:4]): row for row in rows}.values())


def table(rows: Sequence[Row]) -> str:
    """One line for each shape and index, in Markdown: seconds from opening to the first correct answer, by size."""
    rows = latest(rows)
    columns = [
        "shape",
        "index",
        "snapshot, bytes a block",
        "disk, bytes a block",
        "most memory, bytes a block",
        *(f"{size:.0e} blocks: cold / warm, s".replace("e+0", "e") for size in SIZES),
        "before it opens, s",
        "times ours, cold",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for name, cold in _lines(rows, shape):
            largest = cold[-1]
            blocks = largest["blocks"]
            cells = [
                shape,
                name,
                f"{largest['snapshot_bytes'] / blocks:.2f}" if largest["snapshot_bytes"] else "none",
                f"{largest['disk_bytes'] / blocks:.1f}",
                f"{largest['resident_bytes'] / blocks:.1f}",
                *(_cell(rows, cold, size) for size in SIZES),
                f"{min(row['process_s'] - row['open_s'] for row in cold):.2f}",
                _times_ours(rows, cold),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _near(row: Row, size: float) -> bool:
    return bool(size / NEAR < row["blocks"] < size * NEAR)


def _cell(rows: Sequence[Row], cold: list[Row], size: float) -> str:
    """Cold and warm at a size; at the goal what was measured last, in proportion, where it was not measured."""
    for row in cold:
        if _near(row, size):
            return _pair(rows, row, 1)
    if size < GOAL:
        return ""
    largest = cold[-1]
    scaled = _pair(rows, largest, size / largest["blocks"])
    return f"≈ {scaled} (scaled from {largest['blocks']:.0e})".replace("e+0", "e")


def _pair(rows: Sequence[Row], cold: Row, factor: float) -> str:
    """Cold and warm, times a factor."""
    mark = "?" if cold["cache"].endswith("?") else ""
    warm = _warm(rows, cold)
    return f"{_seconds(factor * cold['open_s'])}{mark} / {_seconds(factor * warm['open_s']) if warm else '-'}"


def _warm(rows: Sequence[Row], cold: Row) -> Row | None:
    """The row about the same with a warm cache."""
    alike = ("shape", "contestant", "blocks")
    return next(
        (row for row in rows if row["cache"] == "warm" and all(row[field] == cold[field] for field in alike)), None
    )


def _times_ours(rows: Sequence[Row], cold: list[Row]) -> str:
    """How many times as long as ours, at the largest size at which both were measured."""
    ours = dict(_lines(rows, cold[0]["shape"])).get(OURS, [])
    for row in reversed(cold if cold[0]["contestant"] != OURS else []):
        for one in ours:
            if one["blocks"] == row["blocks"]:
                return f"{row['open_s'] / one['open_s']:.2g} at {row['blocks']:.0e}".replace("e+0", "e")
    return ""


def _seconds(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(max(value, 1e-6))))
    return f"{value:,.{min(digits, 3)}f}"


def _lines(rows: Sequence[Row], shape: str) -> Iterator[tuple[str, list[Row]]]:
    """(contestant, its cold rows by size)."""
    for name in dict.fromkeys(row["contestant"] for row in rows):
        some = [
            row
            for row in rows
            if row["shape"] == shape and row["contestant"] == name and row["cache"].startswith("cold")
        ]
        if some:
            yield name, sorted(some, key=lambda row: int(row["blocks"]))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Seconds over blocks, both logarithmic, a panel a shape; dashed where it was not measured but scaled."""
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        print("no plot: matplotlib is not installed (`make bench` installs the extra `bench`)", file=sys.stderr)
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sarp"  # the same rows give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot  # noqa: PLC0415

    rows = latest(rows)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(6.4 * len(shapes), 5.6), sharey=True, squeeze=False)
    for panel, shape in zip(panels[0], shapes, strict=True):
        for name, some in _lines(rows, shape):
            blocks = [row["blocks"] for row in some]
            seconds = [row["open_s"] for row in some]
            ours = name == OURS
            (line,) = panel.plot(
                blocks,
                seconds,
                marker="o",
                markersize=4,
                linewidth=2.5 if ours else 1.2,
                label=name,
                zorder=3 if ours else 2,
            )
            if blocks[-1] < GOAL:
                scaled = seconds[-1] * GOAL / blocks[-1]
                panel.plot([blocks[-1], GOAL], [seconds[-1], scaled], "--", color=line.get_color(), linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel="blocks", title=shape)
        panel.grid(visible=True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("opening → first correct answer, cold, seconds")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle("Coming back after a crash (dashed: scaled, not measured)")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Print the table of a file of rows, and draw it."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print(table(rows))
    if len(sys.argv) > 2:
        draw(rows, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
