"""An index that churns, and its reference: sequences grow, part, are removed, so that most of what is written dies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from sarp_cluster.config import IndexConfig
from sarp_cluster.storage.file_system import DISK, FileSystem
from sarp_cluster.storage.log import LogStore
from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker
from shard.index import Index
from shard.reclaim import Reclaim

SECRET: Final = bytes(range(32))
CONFIG: Final = IndexConfig(segment_blocks=8, log_file_bytes=16_384, retrieval_max=None, delta_segments_max=16)
SPECS: Final = [NamespaceSpec(tenant=tenant, model="m", hash_profile=HashProfile.OPAQUE) for tenant in ("one", "two")]
WORKERS: Final = [Worker("node-b", 0), Worker("node-b", 1), Worker("node-a", 0)]
SEQUENCES_MAX: Final = 60
TOKENS_MAX: Final = 60

Tokens = tuple[int, ...]


class Churn:
    """An index in a directory, and a reference to which the same happens."""

    def __init__(self, directory: Path, seed: int = 1, config: IndexConfig = CONFIG) -> None:
        self.directory = directory
        self.config = config
        self.rng = random.Random(seed)
        self.reference = ReferenceIndex()
        self.known: list[Tokens] = []
        self._index: Index | None = None

    async def open(self, *, background: bool = False, file_system: FileSystem = DISK) -> Churn:
        """Open the index. Without `background` only what is asked for is done."""
        self._index = await Index.open(self.directory, self.config, secret=SECRET, file_system=file_system)
        if not background:
            await self._index.stop_background()
        self.namespaces = [self._index.create_namespace(spec) for spec in SPECS]
        self.reference_namespaces = [self.reference.create_namespace(spec) for spec in SPECS]
        return self

    @property
    def index(self) -> Index:
        """The open index."""
        assert self._index is not None
        return self._index

    @property
    def store(self) -> LogStore:
        """Its store."""
        assert isinstance(self.index.store, LogStore)
        return self.index.store

    @property
    def reclaim(self) -> Reclaim:
        """What reclaims its space."""
        assert self.index.background.reclaim is not None
        return self.index.background.reclaim

    @property
    def ratio(self) -> float:
        """Bytes on the disk for each live one."""
        statistics = self.index.statistics()
        return statistics.disk_bytes / statistics.live_disk_bytes

    def files(self) -> list[str]:
        """Names of the log files."""
        return sorted(path.name for path in self.directory.glob("log-*"))

    async def change(self, count: int, *, durable: bool = False) -> None:
        """Some changes. What the index refuses does not happen to the reference either."""
        for _ in range(count):
            await self._change(durable)

    async def _change(self, durable: bool) -> None:
        rng = self.rng
        base = rng.choice(self.known) if self.known and rng.random() < 0.8 else ()
        if rng.random() < 0.2:
            base = base[: rng.randint(0, len(base))]
        tokens = (base + tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))))[:TOKENS_MAX]
        which = rng.randrange(2)
        worker = rng.choice(WORKERS)
        generation = self.reference.generation(worker)
        arguments: dict[str, Any] = {"worker": worker, "generation": generation, "tier": Tier(rng.randrange(2))}
        block_ids = chained_block_ids(tokens)
        kind = rng.random()
        if kind < 0.005:
            await self.index.clear_worker(worker, generation=generation + 1)
            self.reference.clear_worker(worker, generation=generation + 1)
        elif kind < 0.2:
            arguments["first"] = rng.randrange(len(tokens))
            await self.index.remove(self.namespaces[which], block_ids, durable=durable, **arguments)
            self.reference.remove(self.reference_namespaces[which], block_ids, **arguments)
        else:
            arguments["handle"] = rng.choice((None, rng.randrange(100)))
            await self.index.insert(self.namespaces[which], block_ids, durable=durable, **arguments)
            self.reference.insert(self.reference_namespaces[which], block_ids, **arguments)
        self.known = [*self.known[-SEQUENCES_MAX:], tokens]

    async def check(self) -> None:
        """Raise AssertionError unless the index answers as the reference does."""
        await self.index.validate()
        assert self.index.statistics().blocks == self.reference.block_count()
        for tokens in self.known:
            block_ids = chained_block_ids(tokens)
            for namespace, reference in zip(self.namespaces, self.reference_namespaces, strict=True):
                answer = Answer.of(await self.index.match(namespace, block_ids, detail="blocks"))
                assert answer == self.reference.match(reference, block_ids, detail="blocks"), tokens

    async def close(self) -> None:
        """Close the index."""
        index, self._index = self._index, None
        if index is not None:
            await index.close()

    async def reopen(self) -> None:
        """Close it and open it again."""
        await self.close()
        await self.open()
