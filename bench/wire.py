"""What it costs to read and to check a message: msgspec beside msgpack with checks in Python, and JSON.

python -m bench.wire                           microseconds a message, best of several rounds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import msgspec

from sarp_cluster import limits
from sarp_cluster.wire import messages
from sarp_cluster.wire.codec import JSON, decode, encode

ROUNDS: Final = 7
DETAILS: Final = ("none", "workers", "blocks")
FIELDS: Final = frozenset(messages.MatchRequest.__struct_fields__)


def best_us(work: Callable[[], object], count: int) -> float:
    """Microseconds of one call, in the best round."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = perf_counter()
        for _ in range(count):
            work()
        best = min(best, perf_counter() - began)
    return best / count * 1e6


def checked(raw: bytes) -> dict[str, Any]:
    """A match request read by msgpack, with the checks that the schema makes."""
    found = msgpack.unpackb(raw, max_bin_len=limits.BODY_BYTES_MAX, strict_map_key=True)
    if not isinstance(found, dict) or found.keys() - FIELDS - {"op"}:
        raise ValueError("fields")
    namespace = found["namespace"]
    if not isinstance(namespace, str) or not 1 <= len(namespace) <= limits.NAME_BYTES_MAX:
        raise ValueError("namespace")
    block_ids = found.get("block_ids")
    if isinstance(block_ids, list):
        if len(block_ids) > limits.REQUEST_BLOCKS_MAX or not all(type(one) is int for one in block_ids):
            raise ValueError("block_ids")
    elif block_ids is not None and not isinstance(block_ids, bytes):
        raise ValueError("block_ids")
    if found.get("detail", "workers") not in DETAILS:
        raise ValueError("detail")
    deadline_ms = found.get("deadline_ms", limits.MATCH_DEADLINE_MS)
    if type(deadline_ms) is not int or not 1 <= deadline_ms <= limits.DEADLINE_MS_MAX:
        raise ValueError("deadline_ms")
    return found


def main() -> int:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{'match request, µs to read and check':<42}{'msgspec':>10}{'msgpack':>10}{'JSON':>10}")
    for blocks in (8, 150, 900, 2_048):
        ids = os.urandom(8 * blocks)
        packed = messages.MatchRequest(namespace="n" * 32, block_ids=ids)
        listed = messages.MatchRequest(namespace="n" * 32, block_ids=list(memoryview(ids).cast("Q")))
        for what, message in (("one bin", packed), ("a list", listed)):
            raw = encode(message)
            text = encode(message, JSON)
            count = 20_000 if message is packed else max(50, 200_000 // blocks)
            times = [
                best_us(lambda raw=raw: decode(raw, messages.MatchRequest), count),  # type: ignore[misc]
                best_us(lambda raw=raw: checked(raw), count),  # type: ignore[misc]
                best_us(lambda text=text: json.loads(text), max(50, 200_000 // blocks)),  # type: ignore[misc]
            ]
            print(f"{f'{blocks:,} blocks as {what}':<42}" + "".join(f"{one:>10.2f}" for one in times))
    reply = messages.MatchReply(
        matched_blocks=150,
        matched_tokens=2_400,
        workers=[
            messages.WorkerMatch(worker=f"worker-{number}", dp_rank=0, gpu=9, cpu=9, ssd=9, remote=9)
            for number in range(8)
        ],
        truncated=False,
        complete=True,
        degraded=[],
        epoch=1,
    )
    plain = msgspec.to_builtins(reply)
    times = [best_us(lambda: encode(reply), 20_000), best_us(lambda: msgpack.packb(plain), 20_000)]
    times.append(best_us(lambda: json.dumps(plain), 5_000))
    print(f"{'reply with 8 workers, µs to write':<42}" + "".join(f"{one:>10.2f}" for one in times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
