"""A record that verifies may still name a worker that the index does not know: it holds nothing, nothing breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, sys
from pathlib import Path
from sarp_cluster.testing.core_access import load, store
from sarp_cluster.testing.segments import make_batch
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

async def main():
    index = await Index.open(Path(sys.argv[1]), secret=bytes(32))
    namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
    ids = bytes(range(64))
    await index.insert(namespace, ids, worker=Worker("known"))
    state = index.state
    batch = load(state.table, [4096])
    assert state.store.read_cached(batch) == 0
    (segment,) = batch.describe()
    stranger = {"worker": 2**32 - 1, "generation": 0, "tier": 0, "mask": 0xFF, "handle": None}
    forged = make_batch([segment | {"runs": [*segment["runs"], stranger], "image_count": 0}])
    state.store.put(forged)
    store(state.table, forged)
    for detail in ("none", "workers", "blocks"):
        for workers in (None, [Worker("known")]):
            answer = await index.match(namespace, ids, detail=detail, workers=workers)
            assert answer.matched_blocks == 8
    assert [one.instance_id for one in (await index.match(namespace, ids)).workers] == ["known"]
    await index.insert(namespace, ids + bytes(8), worker=Worker("other"))
    await index.remove(namespace, ids, worker=Worker("known"))
    await index.validate()
    await index.close()

asyncio.run(main())
"""


def test_a_worker_that_is_not_known_holds_nothing(tmp_path: Path) -> None:
    # In a process of its own: what this guards against ends the process.
    done = subprocess.run(  # noqa: S603  # our own script
        [sys.executable, "-c", SCRIPT, str(tmp_path / "log")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
