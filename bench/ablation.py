"""What refinement, filters, pruning, the layout of filters and the strategy do, on real traces: the paper's tables.

    python -m bench.ablation TRACE…               Markdown tables (the paper's Tables 3 and 4, Figure 10)
    python -m bench.ablation --variant default TRACE…

Each variant replays each trace into a fresh store, with the same secret, so that only what is named differs. Counts are
exact; times are of one run and belong to this machine.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sarp_cluster.config import IndexConfig
from sarp_cluster.replay.replay import replay_trace
from sarp_cluster.replay.report import ReplayReport
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import HashProfile, NamespaceSpec
from shard.index import Index

NO_BACKGROUND = "back-fill pending"
"""No background work until the end of the trace: what the index is like while all of its back-fill is still due."""

VARIANTS = {
    "default": IndexConfig(),
    "paper's filter (64 bits)": IndexConfig(filter_bits=64),
    "stepwise": IndexConfig(strategy="stepwise"),
    "stepwise, 64 bits": IndexConfig(strategy="stepwise", filter_bits=64),
    "no refinement": IndexConfig(refine=False),
    "no filter": IndexConfig(filter=False),
    "no pruning": IndexConfig(prune=False),
    "no cap": IndexConfig(retrieval_max=None),
    NO_BACKGROUND: IndexConfig(),
}


@dataclass(frozen=True)
class Result:
    """One trace under one variant."""

    trace: str
    variant: str
    report: ReplayReport

    def row(self) -> str:
        """A row of the Markdown table."""
        report, done, pending = self.report, self.report.statistics, self.report.statistics_pending
        loss = 0.0 if report.loss is None else report.loss
        candidates = report.candidates
        return (
            f"| {self.trace} | {self.variant} | {report.hit_rate:.4%} | {loss:.5%} | {report.reads_mean:.3f} "
            f"| {report.waves_mean:.4f} "
            f"| {candidates.raw:.2f} / {candidates.filtered:.2f} / {candidates.retrieved:.3f} "
            f"| {done.routing_entries:,} | {done.registrations:,} | {done.segments:,} "
            f"| {done.block_entries / done.blocks:.3f} "
            f"| {pending.resident_bytes / done.blocks:.2f} / {done.resident_bytes / done.blocks:.2f} "
            f"| {done.live_disk_bytes / done.blocks:.1f} / {done.disk_bytes / done.blocks:.1f} "
            f"| {report.match_us.p50:.1f} | {report.insert_us.p50:.1f} |"
        )


HEADER = (
    "| trace | variant | hit rate | loss | reads a match | waves | candidates raw / filtered / retrieved "
    "| routing entries | registrations | segments | block entries a block | resident B a block, pending / done "
    "| disk B a block, live / written | match p50 µs | insert p50 µs |\n" + "|---" * 15 + "|"
)


async def replay(path: Path, variant: str) -> Result:
    """Replay one trace into a fresh store."""
    trace = open_trace(path)
    with TemporaryDirectory() as directory:
        index = await Index.open(Path(directory) / "store", VARIANTS[variant], secret=bytes(32))
        profile = HashProfile.XXH3 if trace.kind == "tokens" else HashProfile.OPAQUE
        spec = NamespaceSpec(model=trace.name, block_size=trace.block_tokens, hash_profile=profile)
        try:
            if variant == NO_BACKGROUND:
                await index.stop_background()
            report = await replay_trace(trace, index, index.create_namespace(spec))
        finally:
            await index.close()
    return Result(trace.name, variant, report)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="default: the sample of examples/")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    options = parser.parse_args()
    traces = options.traces or sorted(Path("examples/sample").glob("*.*z*"))
    print(HEADER)
    for path in traces:
        for variant in options.variant or VARIANTS:
            print(asyncio.run(replay(path, variant)).row(), flush=True)


if __name__ == "__main__":
    main()
