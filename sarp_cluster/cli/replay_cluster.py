"""A cluster as a replay sees an index: matches through the client, inserts through a writer for each worker.

What only the index itself knows (reads, candidates, memory, disk) a cluster does not tell: it is 0 here, and the
report leaves it out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, NamedTuple

from sarp_cluster.client import AsyncClient, Namespace, WorkerWriter
from sarp_cluster.types import (
    BlockLocation,
    CandidateCounts,
    IndexStatistics,
    InsertResult,
    NamespaceSpec,
    Tier,
    Worker,
    WorkerMatch,
)
from sarp_cluster.types import Namespace as AnyNamespace
from sarp_cluster.wire.messages import TIER_NAMES

DEADLINE_MS: Final = 10_000
"""Of a match: a replay compares answers, so it waits for them."""


class ClusterMatch(NamedTuple):
    """See sarp_cluster.types.MatchResult."""

    matched_blocks: int
    verified_blocks: int
    workers: list[WorkerMatch]
    truncated: bool
    blocks: list[list[BlockLocation]] | None = None
    reads: int = 0
    waves: int = 0
    retrieved: int = 0
    windows_routed: int = 0


class ClusterIndex:
    """See sarp_cluster.types.PrefixIndex. Its workers are its own, and gone when it is left."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._run = f"replay {secrets.token_hex(4)}"
        self._writers: dict[Worker, WorkerWriter] = {}
        self._entering: dict[Worker, asyncio.Lock] = {}
        self._stack = AsyncExitStack()
        self.incomplete = 0
        """Answers that may have been shorter than what is there, because a shard did not answer."""

    async def __aenter__(self) -> ClusterIndex:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)
        for worker in self._writers:
            await self._client.deregister_worker(self._named(worker))

    async def create_namespace(self, spec: NamespaceSpec) -> Namespace:
        """A namespace of this replay alone: what earlier ones left is not found."""
        return await self._client.namespace(
            spec.model, lora=spec.lora, salt=self._run, block_size=spec.block_size, hash_profile=spec.hash_profile
        )

    async def match(
        self,
        namespace: AnyNamespace,
        block_ids: bytes,
        *,
        detail: str = "workers",
        tiers: Collection[Tier] | None = None,
        workers: Collection[Worker] | None = None,
        max_workers: int | None = None,
    ) -> ClusterMatch:
        """See PrefixIndex."""
        reply = await self._client.match(
            _ours(namespace),
            block_ids=block_ids,
            detail=detail,
            tiers=None if tiers is None else [TIER_NAMES[tier] for tier in tiers],
            workers=None if workers is None else [self._named(worker) for worker in workers],
            max_workers=max_workers,
            deadline_ms=DEADLINE_MS,
        )
        self.incomplete += not reply.complete
        return ClusterMatch(reply.matched_blocks, reply.matched_blocks, [], reply.truncated)

    async def insert(
        self,
        namespace: AnyNamespace,
        block_ids: bytes,
        *,
        worker: Worker,
        generation: int = 0,
        tier: Tier = Tier.GPU,
        first: int = 0,
        offset: int = 0,
        seq: int | None = None,
        handle: int | None = None,
        durable: bool = True,
    ) -> InsertResult:
        """See PrefixIndex. The writer numbers the changes, whatever `seq` is."""
        writer = await self._writer(worker)
        reply = await writer.insert(
            _ours(namespace), block_ids=block_ids, tier=TIER_NAMES[tier], first=first, handle=handle, durable=durable
        )
        return InsertResult(reply.applied, reply.blocks_added, 0, 0, 0, reply.durable)

    def count_candidates(self, namespace: AnyNamespace, block_ids: bytes) -> CandidateCounts:
        """A cluster does not tell."""
        return CandidateCounts(0, 0)

    async def drain_backfill(self) -> None:
        """The shards do that by themselves."""

    def statistics(self) -> IndexStatistics:
        """A cluster does not tell."""
        return IndexStatistics(
            segments=0,
            blocks=0,
            block_entries=0,
            routing_entries=0,
            registrations=0,
            resident_bytes=0,
            disk_bytes=0,
            live_disk_bytes=0,
            backfills_pending=0,
            deltas_unfolded=0,
        )

    def _named(self, worker: Worker) -> Worker:
        """The worker as the cluster knows it: two replays at once have workers of their own."""
        return Worker(f"{self._run} {worker.instance_id}", worker.dp_rank)

    async def _writer(self, worker: Worker) -> WorkerWriter:
        async with self._entering.setdefault(worker, asyncio.Lock()):
            known = self._writers.get(worker)
            if known is None:
                named = self._named(worker)
                await self._client.register_worker(named)
                known = self._writers[worker] = await self._stack.enter_async_context(self._client.writer(named))
        return known


def _ours(namespace: AnyNamespace) -> Namespace:
    if not isinstance(namespace, Namespace):
        raise TypeError("a namespace of a cluster was made by its client")
    return namespace
