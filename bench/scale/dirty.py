"""Opens a store of ours, takes a snapshot, writes 32 MiB of log behind it, and is killed: what a crash leaves behind.

python -m bench.scale.dirty STORE MODEL BLOCK_SIZE HASH_PROFILE
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from tqdm import tqdm  # type: ignore[import-untyped]

from bench.hot_match import CHAT, synthetic
from bench.scale.process import SECRET
from sarp_cluster import limits
from sarp_cluster.config import IndexConfig
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

TAIL_BYTES: Final = 32 * 1024 * 1024


async def make_dirty(store: Path, spec: NamespaceSpec) -> None:
    """Snapshot, tail, SIGKILL."""
    config = IndexConfig(snapshot_log_bytes=limits.SNAPSHOT_LOG_BYTES_MAX)  # none but the one that is asked for
    with tqdm(unit="B", unit_scale=True, desc="rebuild", leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        index = await Index.open(store, config, secret=SECRET, progress=progress)
    namespace = index.create_namespace(spec)
    await index.drain_backfill()
    await index.snapshot()
    begin = index.store.bytes_appended
    for count, request in enumerate(synthetic(replace(CHAT, conversations=1_000_000, seed=7))):
        worker = Worker(f"late-{request.worker}")
        await index.insert(namespace, request.sequence, worker=worker, first=request.first, durable=False)
        if count % 64 == 0:
            await asyncio.sleep(0)
            if index.store.bytes_appended - begin >= TAIL_BYTES:
                break
    await index.store.sync()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """What the arguments say."""
    store, model, block_size, hash_profile = sys.argv[1:]
    spec = NamespaceSpec(model=model, block_size=int(block_size), hash_profile=HashProfile(hash_profile))
    asyncio.run(make_dirty(Path(store), spec))


if __name__ == "__main__":
    main()
