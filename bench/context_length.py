"""What a match and an insert cost as contexts grow: coding-assistant sessions in 16-token blocks, up to 894k tokens.

    python -m bench.context_length TRACE          a table by context length, and of what was added

A match should cost in proportion to what it returns, an insert to what it adds: the last columns divide by those.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns

import numpy as np

from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

WORKERS = 8
EDGES = (0, 64, 256, 1_024, 4_096, 8_192, 16_384, 32_768, 1 << 20)


async def measure(path: Path, block_tokens: int, limit: int | None) -> np.ndarray:
    """(context blocks, matched blocks, match ns, blocks added, insert ns, segments read by match and insert) each."""
    trace = open_trace(path, block_tokens=block_tokens)
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    with TemporaryDirectory() as directory:
        index = await Index.open(Path(directory) / "store", secret=bytes(32))
        spec = NamespaceSpec(model="bench", block_size=block_tokens, hash_profile=HashProfile.OPAQUE)
        namespace = index.create_namespace(spec)
        gc.collect()
        gc.disable()
        for request in trace.requests(lambda tokens: tokens, limit=limit):
            if not request.context or request.first >= request.sequence_blocks:
                continue
            worker = Worker(f"worker-{request.session % WORKERS}")
            begin = perf_counter_ns()
            found = await index.match(namespace, request.context)
            middle = perf_counter_ns()
            done = await index.insert(namespace, request.sequence, worker=worker, first=request.first, durable=False)
            end = perf_counter_ns()
            added = request.sequence_blocks - request.first
            rows.append(
                (
                    request.context_blocks,
                    found.matched_blocks,
                    middle - begin,
                    added,
                    end - middle,
                    found.reads,
                    done.reads,
                )
            )
            await asyncio.sleep(0)
        gc.enable()
        await index.close()
    return np.array(rows)


def table(rows: np.ndarray, column: int, operation: int, reads: int, title: str) -> None:
    """Medians of one operation by the blocks in `column`."""
    print(f"\n| {title} | requests | blocks, mean | segments read | p50 µs | mean µs | p99 µs | ns a block |")
    print("|---" * 8 + "|")
    for low, high in pairwise(EDGES):
        chosen = rows[(rows[:, column] >= low) & (rows[:, column] < high)]
        if not len(chosen):
            continue
        us = chosen[:, operation] / 1e3
        blocks = chosen[:, column].mean()
        p50, p99 = np.percentile(us, [50, 99])
        print(
            f"| {low:,} to {high - 1:,} | {len(chosen):,} | {blocks:,.0f} | {chosen[:, reads].mean():.1f} | {p50:.1f} "
            f"| {us.mean():.1f} | {p99:.1f} | {1e3 * us.mean() / max(blocks, 1):.1f} |"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("examples/sample/coding_agent_blocks.jsonl.gz")
    parser.add_argument("trace", nargs="?", type=Path, default=default, help="default: the sample")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.trace, options.block_tokens, options.limit))
    table(rows, 1, 2, 5, "match, by blocks returned")
    table(rows, 3, 4, 6, "insert, by blocks newly held")
    table(rows, 0, 4, 6, "insert, by blocks of the context")


if __name__ == "__main__":
    main()
