"""What a replay measured: one JSON object, one row of a table, and what the columns mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from sarp_cluster.types import IndexStatistics


class Latency(NamedTuple):
    """Times of one kind of call, in microseconds. All 0 if there was no call."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of_nanoseconds(cls, times: Sequence[int]) -> Latency:
        """Summary of measured times in nanoseconds."""
        if len(times) == 0:
            return cls(0.0, 0.0, 0.0)
        microseconds = np.asarray(times, dtype=np.float64) / 1_000
        p50, p99 = np.percentile(microseconds, (50, 99)).tolist()
        return cls(float(microseconds.mean()), p50, p99)


class CandidateMeans(NamedTuple):
    """The funnel from a posting list to the reads: the paper's Table 4. None: not measured."""

    raw: float | None
    """References in the posting list that routing chose; mean over requests with at least one."""
    filtered: float | None
    """Of those, the ones whose filter promises most; mean over the same requests."""
    retrieved: float | None
    """Candidates retrieved for each window that was routed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStore:
    """What a store held before a trace was replayed on top of it."""

    segments: int
    blocks: int
    recovery_s: float
    """Until it was open and could answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """One trace, replayed."""

    trace: str
    requests: int
    hit_rate: float
    """Share of context found: of tokens in token traces, of blocks in traces of block IDs."""
    exact_hit_rate: float | None
    """The oracle's, None without one."""
    loss: float | None
    """Share of the blocks the oracle found that the index did not, None without an oracle."""
    reads_mean: float
    """Segments read a match; matches of contexts shorter than a block are not made and not counted."""
    waves_mean: float
    """Rounds of dependent reads a match."""
    candidates: CandidateMeans
    match_us: Latency
    insert_us: Latency
    requests_per_s: float
    statistics: IndexStatistics
    """After the trace, when all back-fill was done."""
    statistics_pending: IndexStatistics
    """At the end of the trace, back-fill still pending."""
    found: FoundStore | None = None
    """What was there before; None: the store was empty."""
    cluster: str | None = None
    """The cluster it was replayed through; what only an index tells is not known then. None: an index here."""
    incomplete: int = 0
    """Answers of a cluster that may have been shorter than what is there, because a shard did not answer."""

    @property
    def resident_bytes_per_block(self) -> float:
        """Bytes in memory for each distinct block, back-fill done."""
        return self.statistics.resident_bytes / max(1, self.statistics.blocks)

    @property
    def disk_bytes_per_block(self) -> float:
        """Bytes on disk for each distinct block, back-fill done."""
        return self.statistics.disk_bytes / max(1, self.statistics.blocks)

    def to_json(self) -> str:
        """One line of JSON. Counts of the index are those after back-fill."""
        fields: dict[str, Any] = {
            "trace": self.trace,
            "requests": self.requests,
            "hit_rate": self.hit_rate,
            "exact_hit_rate": self.exact_hit_rate,
            "loss": self.loss,
            "reads_mean": self.reads_mean,
            "waves_mean": self.waves_mean,
            "candidates": self.candidates._asdict(),
            "routing_entries": self.statistics.routing_entries,
            "registrations": self.statistics.registrations,
            "segments": self.statistics.segments,
            "blocks": self.statistics.blocks,
            "resident_bytes_per_block": self.resident_bytes_per_block,
            "disk_bytes_per_block": self.disk_bytes_per_block,
            "match_us": self.match_us._asdict(),
            "insert_us": self.insert_us._asdict(),
            "requests_per_s": self.requests_per_s,
            "found": None if self.found is None else asdict(self.found),
        }
        if self.cluster is not None:
            fields |= dict.fromkeys(INDEX_FIELDS)
            fields |= {"cluster": self.cluster, "incomplete": self.incomplete}
        return json.dumps(fields)


INDEX_FIELDS: Final = (
    "reads_mean",
    "waves_mean",
    "candidates",
    "routing_entries",
    "registrations",
    "segments",
    "blocks",
    "resident_bytes_per_block",
    "disk_bytes_per_block",
)
"""What only an index tells; its columns stand together in the table, in this order."""

COLUMNS: Final = (
    ("trace", ""),
    ("requests", ""),
    ("hit", "rate"),
    ("exact", "rate"),
    ("loss", ""),
    ("reads", "/match"),
    ("waves", "/match"),
    ("candidates", "raw>filt>retr"),
    ("routing", "entries"),
    ("regis-", "trations"),
    ("segments", ""),
    ("blocks", ""),
    ("RAM", "B/block"),
    ("disk", "B/block"),
    ("match µs", "mean/p50/p99"),
    ("insert µs", "mean/p50/p99"),
    ("requests", "/s"),
)

INDEX_COLUMN: Final = 5
"""The first column that only an index tells."""

EXPLANATION: Final = """\
One row a trace. Each request matches its context, then inserts what it has computed, as an engine would.

  requests    turns of real sessions, in the order of the paper (turn by turn over all sessions) or of arrival
  hit rate    share of the context found in the index: prefill that nobody has to compute again
  exact rate  the same for an exact index without bounds: nothing can do better
  loss        share of what the exact index found that this one missed (a cap on reads may miss, never lie: an answer
              longer than the exact one stops the replay)
  reads       segments read from the store for a match; each was checked, block ID by block ID
  waves       rounds of reads that had to wait for one another: 1 means that all were asked for at once
  candidates  segments in the list that routing found > those left by the filter > those retrieved for a window
  routing entries, registrations
              routing keys in memory, and references in all their lists; S = 64 blocks share a few of them
  segments, blocks
              on disk: up to S consecutive blocks make a segment; distinct blocks
  B/block     bytes in memory and on disk for each distinct block
  match, insert
              time of the awaited call in microseconds: mean / median / 99th percentile (no sync unless --durable)
  requests/s  one after the other unless --in-flight says more; without what the replay itself has to do
"""


WARM: Final = (
    "  These hit rates are of a warm index: compare them with the exact rate beside them, whose oracle was given what",
    "  the store held, and not with runs on an empty store. What a store had lost before, that oracle cannot know",
    "  (`sarp verify` looks for damage). Blocks, memory and disk are the whole store's.",
)


CLUSTER: Final = (
    "Replayed through a cluster: times are those of the client. Reads, candidates, memory and disk are",
    "the shards' own and not told to clients; `sarp status` and /metrics of each shard have them.",
)


def table(reports: Sequence[ReplayReport]) -> str:
    """The reports as aligned plain text, one row a trace, ending in a newline.

    Rows of stores that were not empty have a star, and a note under the table says what they had.
    """
    rows = [tuple(name for name, _ in COLUMNS), tuple(unit for _, unit in COLUMNS)]
    rows += [_cells(report) for report in reports]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    lines.insert(2, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in [*lines, *_notes(reports)]) + "\n"


def _notes(reports: Sequence[ReplayReport]) -> list[str]:
    notes = [
        f"* {report.trace}: its store was not empty. It held {report.found.blocks:,} blocks in "
        f"{report.found.segments:,} segments, recovered in {report.found.recovery_s:.3f} s."
        for report in reports
        if report.found is not None
    ]
    if notes:
        notes += WARM
    if any(report.cluster is not None for report in reports):
        notes += CLUSTER
    incomplete = sum(report.incomplete for report in reports)
    if incomplete:
        notes.append(f"{incomplete:,} answers were cut short because a shard did not answer: they count as loss.")
    return notes


def _cells(report: ReplayReport) -> tuple[str, ...]:
    cells = _all_cells(report)
    if report.cluster is None:
        return cells
    first = INDEX_COLUMN
    return (*cells[:first], *("-" for _ in INDEX_FIELDS), *cells[first + len(INDEX_FIELDS) :])


def _all_cells(report: ReplayReport) -> tuple[str, ...]:
    return (
        report.trace if report.found is None else f"{report.trace} *",
        f"{report.requests:,}",
        _percent(report.hit_rate, 2),
        _percent(report.exact_hit_rate, 2),
        _percent(report.loss, 4),
        f"{report.reads_mean:.2f}",
        f"{report.waves_mean:.2f}",
        ">".join("-" if mean is None else humanised(mean) for mean in report.candidates),
        humanised(report.statistics.routing_entries),
        humanised(report.statistics.registrations),
        humanised(report.statistics.segments),
        humanised(report.statistics.blocks),
        f"{report.resident_bytes_per_block:.2f}",
        f"{report.disk_bytes_per_block:.1f}",
        "/".join(humanised(time) for time in report.match_us),
        "/".join(humanised(time) for time in report.insert_us),
        humanised(report.requests_per_s),
    )


def _percent(share: float | None, digits: int) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def humanised(number: float) -> str:
    """Three significant digits with k, M or G: 12.3k for 12,345. Whole numbers below 1,000 stay as they are."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit * 0.9995:
            return f"{number / unit:.{_digits(number / unit)}f}{suffix}"
    if number == int(number):
        return str(int(number))
    return f"{number:.{_digits(number)}f}"


def _digits(number: float) -> int:
    """Decimals that make three significant digits, with the bounds where rounding adds a digit."""
    return sum(number < bound for bound in (9.995, 99.95))
