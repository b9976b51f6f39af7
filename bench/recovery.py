"""How long until a killed index answers again, beside indexes that load a snapshot into memory.

    python -m bench.recovery                        1e6 and 1e7 blocks, both shapes, all who are installed
    python -m bench.recovery --blocks 1e6 1e7 1e8   larger ones
    python -m bench.recovery --full                 to 1e9: up to 16 GB of files at a time, and 12 GB of memory
    python -m bench.recovery --only SARP --shapes skewed

Indexes are replicas of a real one (bench.scale.template): a trace's, and chats that all part from one prompt. Each
contestant saves the same index in its own format, and starts from it in a process of its own until its first correct
answer about one long sequence: from when it begins to open its files, and from when its process was started. Cold: the
kernel has forgotten its files (checked: a question mark says that it has not). Warm: they are in the page cache.
Medians of some rounds. Who cannot hold a size is measured at the largest it can; what it would take at 1e9 is that,
scaled, and marked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.bulk_load import SAMPLE, SHAPE_SKEWED, SHAPE_TRACE, template_of
from bench.scale.contestants import Contestant, all_contestants, drop_page_cache, files_bytes
from bench.scale.report import draw, table
from bench.scale.template import Template

FULL: Final = (1e6, 1e7, 1e8, 3e8, 1e9)
CACHES: Final = ("cold", "warm")
LONG_S: Final = 20
"""A start that took longer is not repeated."""
Row = dict[str, Any]


def measure(contestant: Contestant, directory: Path, template: Template, blocks: float, rounds: int) -> Iterator[Row]:
    """Save an index once, bring it back some times, cold and warm."""
    replicas = template.replicas_for(blocks)
    contestant.prepare(directory, template, replicas)
    for cache in CACHES:
        starts = []
        dropped = True
        for _ in range(rounds):
            if cache == "cold":
                dropped = drop_page_cache(directory) and dropped
            starts.append(contestant.start(directory, template, replicas))
            if starts[-1]["open_s"] > LONG_S:
                break
        if cache == "warm" and len(starts) > 1:
            starts = starts[1:]  # the first one read what the last cold one may not have
        yield {
            "shape": template.name,
            "contestant": contestant.name,
            "blocks": template.blocks_of(replicas),
            "segments": template.segments_of(replicas),
            "cache": cache if dropped else f"{cache}?",
            "open_s": median(start["open_s"] for start in starts),
            "process_s": median(start["process_s"] for start in starts),
            "open_s_all": [start["open_s"] for start in starts],
            "resident_bytes": max(start["resident_bytes"] for start in starts),
            "snapshot_bytes": contestant.snapshot_bytes(directory),
            "disk_bytes": files_bytes(directory),
        }


def sizes(contestant: Contestant, wanted: list[float]) -> list[float]:
    """The sizes a contestant is measured at: those it can hold, and the largest it can in place of those it cannot."""
    return sorted({min(blocks, contestant.blocks_max) for blocks in wanted})


def main() -> None:
    """Measure, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=float, nargs="+", default=[1e6, 1e7], help="sizes (default: 1e6 1e7)")
    parser.add_argument("--full", action="store_true", help=f"sizes to 1e9: {' '.join(f'{size:g}' for size in FULL)}")
    parser.add_argument(
        "--shapes", nargs="+", choices=(SHAPE_TRACE, SHAPE_SKEWED), default=[SHAPE_TRACE, SHAPE_SKEWED], help="(both)"
    )
    parser.add_argument(
        "--trace", type=Path, default=SAMPLE, help="for the shape `trace` (default: the CodeAct sample)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants whose names begin so (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="starts of which medians are taken (default: %(default)s)"
    )
    parser.add_argument("--dir", type=Path, help="on the disk that is measured (default: a temporary directory)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the rows to this file, one a line; and draw all in it"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw them there (needs the extra `bench`)")
    options = parser.parse_args()
    wanted = list(FULL) if options.full else options.blocks
    rows: list[Row] = []
    for shape in options.shapes:
        template = template_of(shape, options.trace)
        for contestant in all_contestants():
            if options.only and not contestant.name.startswith(tuple(options.only)):
                continue
            reason = contestant.missing()
            if reason is not None:
                print(f"{contestant.name} is left out: {reason}", file=sys.stderr)
                continue
            for blocks in sizes(contestant, wanted):
                with TemporaryDirectory(dir=options.dir) as directory:
                    for row in measure(contestant, Path(directory), template, blocks, options.rounds):
                        print(json.dumps(row), file=sys.stderr, flush=True)
                        rows.append(row)
                        if options.json:
                            with options.json.open("a") as file:
                                file.write(json.dumps(row) + "\n")
    print(table(rows))
    if options.svg:
        kept = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json else rows
        draw(kept, options.svg)


if __name__ == "__main__":
    main()
