"""What bench.recovery measured, as a table and as a plot.

python -m bench.scale.report ROWS.json [PLOT.svg]     of rows that were kept with --json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scale.contestants import OURS

GOAL: Final = 1e9
COLUMNS: Final = (
    "shape",
    "index",
    "blocks",
    "snapshot, bytes a block",
    "disk, MB",
    "most memory, MB",
    "open → answer, s: cold / warm",
    "process start → answer, s: cold / warm",
    "times ours, cold",
    "at 1e9 blocks, cold, s",
)
Row = dict[str, Any]


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of rows about the same, the last one."""
    return list({(row["shape"], row["contestant"], row["blocks"], row["cache"][:4]): row for row in rows}.values())


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, cold and warm in one."""
    rows = latest(rows)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for cold in rows:
        if not cold["cache"].startswith("cold"):
            continue
        warm = _find(rows, cold, "warm")
        ours = _find(rows, {**cold, "contestant": OURS}, "cold")
        largest = max(row["blocks"] for row in rows if _alike(row, cold))
        cells = [
            cold["shape"],
            cold["contestant"],
            f"{cold['blocks']:,}",
            f"{cold['snapshot_bytes'] / cold['blocks']:.2f}" if cold["snapshot_bytes"] else "none",
            f"{cold['disk_bytes'] / 1e6:,.0f}",
            f"{cold['resident_bytes'] / 1e6:,.0f}",
            _pair(cold, warm, "open_s"),
            _pair(cold, warm, "process_s"),
            "" if ours is None or cold["contestant"] == OURS else f"{cold['open_s'] / ours['open_s']:.1f}",
            "" if cold["blocks"] < largest else _at_goal(cold),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _alike(row: Row, other: Row) -> bool:
    return bool(row["shape"] == other["shape"] and row["contestant"] == other["contestant"])


def _find(rows: Sequence[Row], like: Row, cache: str) -> Row | None:
    """The row about the same size (contestants reach it with the same replicas), in this state of the cache."""
    return next(
        (
            row
            for row in rows
            if _alike(row, like) and row["blocks"] == like["blocks"] and row["cache"].startswith(cache)
        ),
        None,
    )


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _pair(cold: Row, warm: Row | None, field: str) -> str:
    mark = "?" if cold["cache"].endswith("?") else ""
    return f"{_seconds(cold[field])}{mark} / {_seconds(warm[field]) if warm else '-'}"


def _at_goal(row: Row) -> str:
    """Measured, or scaled in proportion from the largest size that was."""
    if row["blocks"] >= GOAL:
        return f"{row['open_s']:.3g}"
    return f"≈ {row['open_s'] * GOAL / row['blocks']:.3g} (scaled)"


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
