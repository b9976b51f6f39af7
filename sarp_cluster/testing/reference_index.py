"""What an index must answer, by brute force: a trie of blocks, a dictionary of locations at each, nothing clever.

The oracle of the property tests. It has the methods of `shard.index.Index` without the waiting: no segments, no
routing, no filters, no disk. It checks of its arguments only what decides about the answer (namespace, generation, seq,
prefix).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import xxhash

from sarp_cluster.errors import StaleGenerationError, UnknownNamespaceError, UnknownPrefixError
from sarp_cluster.types import BlockLocation, InsertResult, MatchResult, NamespaceSpec, Tier, Worker


def chained_block_ids(tokens: Iterable[int]) -> bytes:
    """Block IDs as an engine would send them, one for each of `tokens`: an ID depends on every token up to its own."""
    block_id, block_ids = 0, []
    for token in tokens:
        block_id = xxhash.xxh3_64_intdigest(struct.pack("<QQ", block_id, token))
        block_ids.append(block_id)
    return struct.pack(f"<{len(block_ids)}Q", *block_ids)


class WorkerCounts(NamedTuple):
    """A `WorkerMatch` as plain values."""

    instance_id: str
    dp_rank: int
    gpu: int
    cpu: int
    ssd: int
    remote: int


class Answer(NamedTuple):
    """What a match answers, without what it cost: equal answers are equal values."""

    matched_blocks: int
    verified_blocks: int
    workers: list[WorkerCounts]
    blocks: list[list[BlockLocation]] | None
    truncated: bool

    @classmethod
    def of(cls, result: MatchResult) -> Answer:
        """The answer in the result of any index."""
        workers = [WorkerCounts(w.instance_id, w.dp_rank, w.gpu, w.cpu, w.ssd, w.remote) for w in result.workers]
        blocks = result.blocks
        if blocks is not None:
            blocks = [[BlockLocation(Worker(*w), Tier(tier), handle) for w, tier, handle in block] for block in blocks]
        return cls(result.matched_blocks, result.verified_blocks, workers, blocks, result.truncated)


class _Block:
    """A present block: a node of the trie."""

    def __init__(self) -> None:
        self.children: dict[int, _Block] = {}
        # (worker, tier) -> (generation, handle) of the latest insert; dead ones stay and are not counted
        self.held: dict[tuple[Worker, Tier], tuple[int, int | None]] = {}


class ReferenceNamespace:
    """A namespace of a ReferenceIndex: the trie of its blocks."""

    def __init__(self, spec: NamespaceSpec) -> None:
        self.spec = spec
        self._root = _Block()

    def path(self, block_ids: Sequence[int]) -> list[_Block]:
        """The longest present prefix."""
        path, block = [], self._root
        for block_id in block_ids:
            child = block.children.get(block_id)
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def add(self, block_ids: Sequence[int], parent: _Block | None = None) -> tuple[list[_Block], int]:
        """Make the blocks below `parent` (None: from the beginning) present: the blocks, and how many are new."""
        path, added, block = [], 0, parent or self._root
        for block_id in block_ids:
            if block_id not in block.children:
                block.children[block_id] = _Block()
                added += 1
            block = block.children[block_id]
            path.append(block)
        return path, added

    def parent_of(self, block_id: int, position: int) -> _Block | None:
        """The block before the one called `block_id` at `position`; None if that is not there. Looks at every block."""
        for depth, block in self.walk():
            if depth == position and block_id in block.children:
                return block
        return None

    def walk(self) -> Iterator[tuple[int, _Block]]:
        """Every block and its number of ancestors plus one, that is the position of its children; first the root."""
        waiting = [(0, self._root)]
        while waiting:
            depth, block = waiting.pop()
            yield depth, block
            waiting += [(depth + 1, child) for child in block.children.values()]


class ReferenceIndex:
    """The model of an index: the methods and meanings of `shard.index.Index`, by brute force."""

    def __init__(self) -> None:
        self._namespaces: dict[NamespaceSpec, ReferenceNamespace] = {}
        self._generations: dict[Worker, int] = {}
        self._last_seqs: dict[Worker, int] = {}  # of the worker's present generation

    def create_namespace(self, spec: NamespaceSpec) -> ReferenceNamespace:
        """The namespace of `spec`; the same again is the same namespace."""
        return self._namespaces.setdefault(spec, ReferenceNamespace(spec))

    def generation(self, worker: Worker) -> int:
        """The newest generation known of `worker`; 0 before anything is known."""
        return self._generations.get(worker, 0)

    def last_seq(self, worker: Worker) -> int | None:
        """The highest seq applied in the worker's present generation."""
        return self._last_seqs.get(worker)

    def block_count(self) -> int:
        """Blocks present, in all namespaces."""
        return sum(sum(1 for _ in namespace.walk()) - 1 for namespace in self._namespaces.values())

    def match(
        self,
        namespace: ReferenceNamespace,
        block_ids: bytes,
        *,
        detail: str = "workers",
        tiers: Collection[Tier] | None = None,
        workers: Collection[Worker] | None = None,
        max_workers: int | None = None,
    ) -> Answer:
        """The longest prefix that somebody holds, and who holds it."""
        self._check_namespace(namespace)
        path = namespace.path(_unpack(block_ids))
        located: list[list[BlockLocation]] = []
        for block in path:
            locations = sorted(
                BlockLocation(worker, tier, handle)
                for (worker, tier), (generation, handle) in block.held.items()
                if generation == self.generation(worker)
                and (tiers is None or tier in tiers)
                and (workers is None or worker in workers)
            )
            if not locations:
                break
            located.append(locations)
        named = {location.worker for block in located for location in block} if detail != "none" else ()
        holders = sorted(
            (_counts(worker, located) for worker in named),
            key=lambda holder: (-holder.remote, holder.instance_id, holder.dp_rank),
        )
        holders = [holder for holder in holders if holder.remote]
        return Answer(
            matched_blocks=len(located),
            verified_blocks=len(path),
            workers=holders[:max_workers],
            blocks=located if detail == "blocks" else None,
            truncated=max_workers is not None and len(holders) > max_workers,
        )

    def insert(
        self,
        namespace: ReferenceNamespace,
        block_ids: bytes,
        *,
        worker: Worker,
        generation: int = 0,
        tier: Tier = Tier.GPU,
        first: int = 0,
        offset: int = 0,
        seq: int | None = None,
        handle: int | None = None,
    ) -> InsertResult:
        """`worker` newly holds the blocks at [first, end); those before are present, whoever holds them."""
        self._check_namespace(namespace)
        if self._is_repetition(worker, generation, seq):
            return InsertResult(applied=False, blocks_added=0, segments_written=0, reads=0, waves=0)
        ids = _unpack(block_ids)
        parent = namespace.parent_of(ids[0], offset) if offset else None
        if offset and parent is None:
            raise UnknownPrefixError(f"offset: no block {ids[0]:#x} at position {offset}", field="offset")
        self._note_change(worker, generation, seq)
        path, added = namespace.add(ids, parent)
        for block in path[first - offset :]:
            block.held[worker, tier] = (generation, handle)
        return InsertResult(applied=True, blocks_added=added, segments_written=0, reads=0, waves=0)

    def remove(
        self,
        namespace: ReferenceNamespace,
        block_ids: bytes,
        *,
        worker: Worker,
        generation: int = 0,
        tier: Tier | None = None,
        first: int = 0,
        last: int | None = None,
        seq: int | None = None,
    ) -> int:
        """`worker` no longer holds [first, last) on `tier` (None: on any). The live locations that vanished."""
        self._check_namespace(namespace)
        if self._is_repetition(worker, generation, seq):
            return 0
        self._note_change(worker, generation, seq)
        gone = [
            block.held.pop((worker, each), None)
            for block in namespace.path(_unpack(block_ids))[first:last]
            for each in (Tier if tier is None else [tier])
        ]
        return sum(location is not None and location[0] == generation for location in gone)

    def clear_worker(self, worker: Worker, *, generation: int) -> None:
        """The worker's cache is gone: it begins again, with nothing, in `generation`."""
        self._is_repetition(worker, generation, None)
        self._note_change(worker, generation, None)

    def _check_namespace(self, namespace: ReferenceNamespace) -> None:
        if self._namespaces.get(namespace.spec) is not namespace:
            raise UnknownNamespaceError(f"namespace: {namespace.spec} is not one of this index", field="namespace")

    def _is_repetition(self, worker: Worker, generation: int, seq: int | None) -> bool:
        """True if this change was applied before. Raises if it comes from a cache that is gone."""
        known = self.generation(worker)
        if generation < known:
            raise StaleGenerationError(f"generation: {generation} is older than {known}", field="generation")
        last = self.last_seq(worker)
        return generation == known and seq is not None and last is not None and seq <= last

    def _note_change(self, worker: Worker, generation: int, seq: int | None) -> None:
        if generation > self.generation(worker):
            self._last_seqs.pop(worker, None)
        self._generations[worker] = generation
        if seq is not None:
            self._last_seqs[worker] = seq


def _unpack(block_ids: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(block_ids) // 8}Q", block_ids)


def _counts(worker: Worker, located: list[list[BlockLocation]]) -> WorkerCounts:
    """How long a prefix `worker` holds, by tier: a block counts for a tier that holds it and for each slower one."""

    def prefix(slowest: Tier) -> int:
        held = (any(at.worker == worker and at.tier <= slowest for at in block) for block in located)
        return sum(1 for _ in takewhile(bool, held))

    return WorkerCounts(*worker, prefix(Tier.GPU), prefix(Tier.CPU), prefix(Tier.SSD), prefix(Tier.REMOTE))
