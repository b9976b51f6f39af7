"""Opens a store of ours, asks for one sequence, prints what was measured as JSON, and is killed.

python -m bench.scale.reopen STORE QUERY MODEL BLOCK_SIZE HASH_PROFILE STARTED
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from bench.scale.process import SECRET, report
from sarp_cluster.types import HashProfile, NamespaceSpec
from shard.index import Index


async def reopen(store: Path, query: bytes, spec: NamespaceSpec, started: int) -> None:
    """Open, match, print; and no closing, which might save something."""
    opening = time.monotonic_ns()
    index = await Index.open(store, secret=SECRET)
    ready = time.monotonic_ns()
    found = await index.match(index.create_namespace(spec), query)
    answered = time.monotonic_ns()
    if found.matched_blocks != len(query) // 8:
        raise SystemExit(f"{found.matched_blocks} of {len(query) // 8} blocks were found again")
    print(report(started=started, opening=opening, ready=ready, answered=answered), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """What the arguments say."""
    store, query, model, block_size, hash_profile, started = sys.argv[1:]
    spec = NamespaceSpec(model=model, block_size=int(block_size), hash_profile=HashProfile(hash_profile))
    asyncio.run(reopen(Path(store), Path(query).read_bytes(), spec, int(started)))


if __name__ == "__main__":
    main()
