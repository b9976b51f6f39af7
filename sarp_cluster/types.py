"""The values that cross borders: what a caller gives to an index and what it gets back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol


class Tier(IntEnum):
    """Where a worker keeps a block, fastest first: a prefix held on a tier counts what faster tiers hold too."""

    GPU = 0
    CPU = 1
    SSD = 2
    REMOTE = 3


class HashProfile(StrEnum):
    """How a namespace's block IDs come about."""

    XXH3 = "xxh3"
    """From token IDs by NVIDIA Dynamo's rule (chained XXH3-64, seed 1337). Assumes users who trust one another."""
    OPAQUE = "opaque"
    """The caller's own 64-bit IDs, chained: an ID names all blocks through its own."""


class Worker(NamedTuple):
    """A serving instance that holds blocks: one data-parallel rank of one instance."""

    instance_id: str
    dp_rank: int = 0


class WorkerMark(NamedTuple):
    """How far a worker's changes have come."""

    generation: int
    """Of its cache."""
    seq: int
    """Of the last change that was applied in this generation; -1: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """What must agree for two sequences to share blocks. Any field that differs makes another namespace."""

    tenant: str = "default"
    model: str
    lora: str = ""
    salt: str = ""
    block_size: int = 16
    """Tokens a block."""
    hash_profile: HashProfile = HashProfile.XXH3


class WorkerMatch(Protocol):
    """What one worker holds of a matched sequence: the longest prefix, in blocks, by tier.

    Cumulative: `cpu` counts each block held on gpu or cpu, and so on; gpu <= cpu <= ssd <= remote.
    """

    @property
    def instance_id(self) -> str:
        """The worker's instance."""

    @property
    def dp_rank(self) -> int:
        """Its data-parallel rank."""

    @property
    def gpu(self) -> int:
        """Blocks held on the GPU."""

    @property
    def cpu(self) -> int:
        """Blocks held on the GPU or in CPU memory."""

    @property
    def ssd(self) -> int:
        """Blocks held on the GPU, in CPU memory or on local SSD."""

    @property
    def remote(self) -> int:
        """Blocks held on any tier."""


class BlockLocation(NamedTuple):
    """One place that holds a block."""

    worker: Worker
    tier: Tier
    handle: int | None


class MatchResult(Protocol):
    """The answer to a match."""

    @property
    def matched_blocks(self) -> int:
        """Longest prefix of which each block has at least one live location under the request's filters."""

    @property
    def verified_blocks(self) -> int:
        """Longest prefix whose block IDs were read from the store and equal the query's; >= matched_blocks."""

    @property
    def workers(self) -> list[WorkerMatch]:
        """Who holds what, the longest first, then by worker."""

    @property
    def blocks(self) -> list[list[BlockLocation]] | None:
        """With detail "blocks": for each matched block, in token order, where it is; the last ones are left out where
        there would be more than limits.LOCATIONS_ANSWER_MAX locations (then `truncated`)."""

    @property
    def truncated(self) -> bool:
        """True when `max_workers` left workers out, or `blocks` ends early (limits.LOCATIONS_ANSWER_MAX)."""

    @property
    def reads(self) -> int:
        """Segments read from the store, origins and ancestors included."""

    @property
    def waves(self) -> int:
        """Rounds of reads that depended on one another."""

    @property
    def retrieved(self) -> int:
        """Candidates retrieved: what MaxRetrieval bounds."""

    @property
    def windows_routed(self) -> int:
        """Windows in which candidates were chosen (1 a match in one wave, one a window stepwise)."""


class InsertResult(NamedTuple):
    """What an insert did."""

    applied: bool
    """False when the worker's seq says that this change was applied before: a repetition, harmless."""
    blocks_added: int
    """Blocks that were not in the index before."""
    segments_written: int
    reads: int
    waves: int
    durable: bool = False
    """True: synced to the disk before this answer. False (by the caller's choice): it will be, soon."""


class CandidateCounts(NamedTuple):
    """Candidates of a query's deepest window: the columns of the paper's Table 4 that need no read."""

    raw: int
    """References in the posting list that routing chose."""
    filtered: int
    """Of those, the ones whose filter has the largest match potential."""


class Namespace(Protocol):
    """A namespace of an open index."""

    @property
    def spec(self) -> NamespaceSpec:
        """What the namespace was created with."""

    def block_ids(self, token_ids: bytes) -> bytes:
        """Wire IDs (u64 little-endian) of the full blocks of `token_ids` (u32 little-endian), chained.

        Raises BadRequestError for the opaque profile, whose IDs only the caller knows.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatistics:
    """Counters of an index at one moment."""

    segments: int
    blocks: int
    """Distinct blocks: each at its home, copies not counted."""
    block_entries: int
    """Block IDs stored, copies counted (the paper's Table 5)."""
    routing_entries: int
    """Distinct routing keys."""
    registrations: int
    """References in all posting lists."""
    resident_bytes: int
    """Bytes of the routing directory and the segment table, all levels."""
    disk_bytes: int
    live_disk_bytes: int
    """Of disk_bytes, records that a segment still points to."""
    backfills_pending: int
    deltas_unfolded: int
    reclaimed_files: int = 0
    """Log files that were reclaimed since the index was opened."""
    reclaimed_bytes: int = 0
    """Their bytes."""
    rewritten_bytes: int = 0
    """Bytes that were written anew for that."""
    unloaded_chunks: int = 0
    """Chunks and pages of the snapshot that was opened which are not in memory yet."""
    damaged_segments: int = 0
    """Times that a segment which was read did not verify."""
    scrubbed_segments: int = 0
    """Segments that the scrub has read."""
    blocked_files: int = 0
    """Log files that cannot be reclaimed, because a segment in them cannot be read."""


class PrefixIndex(Protocol):
    """An index, as those who measure one see it. `shard.index.Index` is ours."""

    async def match(
        self,
        namespace: Namespace,
        block_ids: bytes,
        *,
        detail: str = "workers",
        tiers: Collection[Tier] | None = None,
        workers: Collection[Worker] | None = None,
        max_workers: int | None = None,
    ) -> MatchResult:
        """Longest prefix of `block_ids` (wire IDs, u64 little-endian) that somebody holds, and who holds it."""

    async def insert(
        self,
        namespace: Namespace,
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
        """`worker` newly holds the blocks at positions [first, offset + len(block_ids) / 8) of this sequence."""

    def count_candidates(self, namespace: Namespace, block_ids: bytes) -> CandidateCounts:
        """What routing and filtering leave to retrieve for this query; reads nothing, changes nothing."""

    async def drain_backfill(self) -> None:
        """Wait until no back-fill, fold or merge is due."""

    def statistics(self) -> IndexStatistics:
        """Counters at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened in a cluster, for people to read."""

    number: int
    time: float
    """Seconds since 1970, by the coordinator's clock."""
    node: str
    """Empty: the cluster itself."""
    kind: str
    text: str
