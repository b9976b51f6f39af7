"""A small store made by today's code, and the golden directories that hold one of each version's.

`python -m tests.golden.store_directory` writes the directory anew. As with the golden records, do that only together
with a new version of the format.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.config import IndexConfig
from sarp_cluster.storage.store_directory import LOG_NAME, MANIFEST_NAME, RUN_NAME
from sarp_cluster.testing.reference_index import ReferenceIndex, chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker
from shard.index import Index

GOLDEN_STORE: Final = Path(__file__).parent / "store-v3"
OLDER: Final = tuple(Path(__file__).parent / name for name in ("store-v1", "store-v2"))
"""Those of older versions, which are read and not written any more."""
SECRET: Final = bytes(range(100, 132))
CONFIG: Final = IndexConfig(segment_blocks=8, log_file_bytes=4_096)
SPECS: Final = tuple(
    NamespaceSpec(tenant=tenant, model="m", hash_profile=HashProfile.OPAQUE) for tenant in ("one", "Zürich")
)
WORKERS: Final = (Worker("node-b", 0), Worker("node-b", 1), Worker("node-a", 0))
STEM: Final = tuple(range(30))


class Insert(NamedTuple):
    """What a worker newly held."""

    namespace: int
    tokens: tuple[int, ...]
    worker: Worker
    generation: int = 0
    tier: Tier = Tier.GPU
    first: int = 0
    seq: int | None = None
    handle: int | None = None


INSERTS: Final = (
    Insert(0, STEM, WORKERS[0], handle=7, seq=10),
    Insert(0, (*STEM[:20], 90, 91), WORKERS[1], tier=Tier.CPU),
    Insert(1, STEM[:9], WORKERS[0], seq=11),
    Insert(0, (*STEM, 30, 31, 32), WORKERS[0], first=30, seq=12),
    Insert(0, STEM[:24], WORKERS[2], generation=3, tier=Tier.SSD),
    *(Insert(0, (*STEM[: 3 * n], 100 + n, 7), WORKERS[n % 3], generation=3 * (n % 3 == 2)) for n in range(10)),
    Insert(1, STEM[:12], WORKERS[1], generation=1, handle=2**64 - 1, seq=5),  # ends what it held before
)
SNAPSHOT_AFTER: Final = 8
"""Inserts that are in the store's snapshot."""
SEQUENCES: Final = sorted({(one.namespace, one.tokens) for one in INSERTS})


def reference(inserts: Sequence[Insert] = INSERTS) -> ReferenceIndex:
    """The brute-force index after these inserts."""
    index = ReferenceIndex()
    namespaces = [index.create_namespace(spec) for spec in SPECS]
    for one in inserts:
        arguments = one._asdict()
        namespace = namespaces[arguments.pop("namespace")]
        index.insert(namespace, chained_block_ids(arguments.pop("tokens")), **arguments)
    return index


async def write_store(
    directory: Path,
    config: IndexConfig = CONFIG,
    *,
    secret: bytes | None = SECRET,
    inserts: Sequence[Insert] = INSERTS,
    snapshots_after: Collection[int] = (),
) -> None:
    """Make the store in `directory`; with snapshots, after so many inserts."""
    index = await Index.open(directory, config, secret=secret)
    namespaces = [index.create_namespace(spec) for spec in SPECS]
    for number, one in enumerate(inserts):
        if number in snapshots_after:
            await index.snapshot()
        arguments = one._asdict()
        namespace = namespaces[arguments.pop("namespace")]
        await index.insert(namespace, chained_block_ids(arguments.pop("tokens")), **arguments)
    await index.close()


def main() -> None:
    """Write the golden directory anew."""
    GOLDEN_STORE.mkdir(exist_ok=True)
    for path in GOLDEN_STORE.iterdir():
        path.unlink()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(write_store(Path(directory), snapshots_after=(SNAPSHOT_AFTER,)))
        for path in Path(directory).iterdir():
            if any(pattern.fullmatch(path.name) for pattern in (LOG_NAME, RUN_NAME, MANIFEST_NAME)):
                (GOLDEN_STORE / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
