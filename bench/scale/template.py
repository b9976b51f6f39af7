"""Templates: what a real index made of a workload, to be replicated to any size (as the paper does, §6.3).

A replica has the template's segments under other slots, its block IDs with a mask XORed in; the mask's low 16 bits are
0, so routing keys differ and filters do not. Two shapes:

* `trace`: a trace was replayed; every replica stands for itself, as if other users had done the same.
* `skewed`: thousands of chats under one prompt. The prompt is *shared*: replicas part from it as the template's chats
  do, so that the posting lists under the prompt's routing keys grow with the store.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.scale.process import SECRET
from sarp_cluster.core.block_id import NamespaceKey, xxh3
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.errors import invariant
from sarp_cluster.replay.replay import replay_trace
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

FIRST_SLOT: Final = 4096
PROMPT_BLOCKS: Final = 48
CHATS: Final = 3_000
CHAT_BLOCKS: Final = 150
WORKERS: Final = 8
MASK_BITS: Final = 0xFFFF_FFFF_FFFF_0000
PATHS: Final = 64
"""Sequences a template remembers, to be asked for in any replica."""

Words = NDArray[np.uint64]
ENTRY: Final = np.dtype([("key", "<u8"), ("high", "<u8"), ("low", "<u8"), ("slot", "<u4"), ("zero", "<u4")])
"""One registration: routing key, filter, segment."""


class Part(NamedTuple):
    """Block IDs of a sequence that stand in one segment, and how many of them no mask changes."""

    ids: Words
    fixed: int


@dataclass(frozen=True, kw_only=True)
class Template:
    """A real index, to be replicated."""

    name: str
    spec: NamespaceSpec
    batch: SegmentBatch
    """All segments, read."""
    shared: int
    """Leading segments that all replicas have in common."""
    workers: list[Worker]
    parent: NDArray[np.int64]
    """By segment: which one is its parent; -1: none. So `origin`."""
    origin: NDArray[np.int64]
    fork: NDArray[np.int64]
    count: NDArray[np.int64]
    home: Words
    """IDs of all blocks, each once, segment by segment."""
    home_begin: NDArray[np.int64]
    """By segment: where its own blocks begin in `home`; one more at the end."""
    entries: NDArray[Any]
    """All registrations (ENTRY)."""
    entry_masked: NDArray[np.bool_]
    """By registration: does its key change with the mask?"""
    paths: list[list[Part]]
    """Some sequences, segment by segment."""
    path_slots: list[int]
    """Slots of their last segments."""
    key: NamespaceKey

    @property
    def segments(self) -> int:
        """Segments of the template, the shared ones included."""
        return len(self.parent)

    @property
    def blocks(self) -> int:
        """Distinct blocks of the template."""
        return len(self.home)

    @property
    def shared_blocks(self) -> int:
        """Of those, the ones that replicas have in common."""
        return int(self.home_begin[self.shared])

    def replicas_for(self, blocks: float) -> int:
        """Replicas (the template is the first) for at least so many blocks."""
        own = self.blocks - self.shared_blocks
        return max(1, -(-(int(blocks) - self.shared_blocks) // own))

    def blocks_of(self, replicas: int) -> int:
        """Distinct blocks of so many replicas."""
        return self.shared_blocks + replicas * (self.blocks - self.shared_blocks)

    def segments_of(self, replicas: int) -> int:
        """Segments of so many replicas."""
        return self.shared + replicas * (self.segments - self.shared)

    def slots_of(self, replica: int) -> int:
        """By how much the slots of a replica go up."""
        return replica * (self.segments - self.shared)

    def query(self, number: int, replica: int) -> bytes:
        """Wire IDs of one of its sequences in a replica. All of it is there."""
        mask = np.uint64(mask_of(replica))
        ids = [np.concatenate((part.ids[: part.fixed], part.ids[part.fixed :] ^ mask)) for part in self.paths[number]]
        return self.key.wire_ids(np.concatenate(ids).tobytes())

    def internal_query(self, number: int, replica: int) -> Words:
        """The same as internal IDs: what a baseline is asked for, which knows no namespaces."""
        return np.frombuffer(self.key.internal_ids(self.query(number, replica)), dtype="<u8")


def mask_of(replica: int) -> int:
    """What is XORed into a replica's block IDs; 0 for the template itself."""
    return xxh3(replica.to_bytes(8, "little")) & MASK_BITS if replica else 0


async def of_trace(path: Path, limit: int | None = None) -> Template:
    """A trace, replayed."""
    trace = open_trace(path)
    profile = HashProfile.XXH3 if trace.kind == "tokens" else HashProfile.OPAQUE
    spec = NamespaceSpec(model=f"scale/{trace.name}", block_size=trace.block_tokens, hash_profile=profile)
    with TemporaryDirectory() as directory:
        index = await Index.open(Path(directory) / "store", secret=SECRET)
        namespace = index.create_namespace(spec)
        await replay_trace(
            trace, index, namespace, workers=WORKERS, limit=limit, with_oracle=False, with_candidates=False
        )
        return await _taken(trace.name, spec, index, shared=0)


async def skewed(chats: int = CHATS) -> Template:
    """Chats that all part from one prompt, at its end."""
    spec = NamespaceSpec(model="scale/skewed", hash_profile=HashProfile.OPAQUE)
    rng = random.Random(1)
    prompt = rng.randbytes(8 * PROMPT_BLOCKS)
    with TemporaryDirectory() as directory:
        index = await Index.open(Path(directory) / "store", secret=SECRET)
        namespace = index.create_namespace(spec)
        for number in range(1 + chats):
            ids = prompt + rng.randbytes(8 * (CHAT_BLOCKS - PROMPT_BLOCKS))
            await index.insert(namespace, ids, worker=Worker(f"worker-{number % WORKERS}"), durable=False)
        # The first chat has the prompt, and so is what all others share.
        return await _taken("skewed", spec, index, shared=-(-CHAT_BLOCKS // index.state.config.segment_blocks))


async def _taken(name: str, spec: NamespaceSpec, index: Index, shared: int) -> Template:
    """The template of an index, which is closed."""
    await index.drain_backfill()
    await index.stop_background()
    slots = [slot for some in index.state.table.slots_in_use(4096) for slot in some]
    invariant(slots == list(range(FIRST_SLOT, FIRST_SLOT + len(slots))), "a template's slots have gaps")
    search = index.state.search()
    search.load_segments(slots)
    index.store.read_wait(search.batch)
    segments = search.batch.describe()
    postings = [one for one in index.state.directory.postings() if one[3] >= FIRST_SLOT]
    workers = [Worker(*names) for names in index.state.workers.names]
    mask = 2**64 - 1 ^ (2 ** (64 - index.state.config.routing_key_bits) - 1)
    await index.close()

    fork = np.array([segment["fork"] for segment in segments])
    count = np.array([segment["count"] for segment in segments])
    origin = np.array([segment["origin"] - FIRST_SLOT if segment["origin"] else -1 for segment in segments])
    fixed = np.where((origin >= 0) & (origin < shared), fork, 0)  # copied of what is shared
    fixed[:shared] = count[:shared]
    entries = np.zeros(len(postings), dtype=ENTRY)
    masked = np.zeros(len(postings), dtype=np.bool_)
    for number, (key, high, low, slot) in enumerate(postings):
        entries[number] = (key, high, low, slot, 0)
        segment = segments[slot - FIRST_SLOT]
        point = next(at for at, block_id in enumerate(segment["ids"]) if block_id & mask == key)
        masked[number] = point >= fixed[slot - FIRST_SLOT]
    leaves = _leaves(segments, shared)
    home = [np.array(segment["ids"][segment["fork"] :], dtype=np.uint64) for segment in segments]
    return Template(
        name=name,
        spec=spec,
        batch=search.batch,
        shared=shared,
        workers=workers,
        parent=np.array([segment["parent"] - FIRST_SLOT if segment["parent"] else -1 for segment in segments]),
        origin=origin,
        fork=fork,
        count=count,
        home=np.concatenate(home),
        home_begin=np.concatenate(([0], np.cumsum(count - fork))),
        entries=entries,
        entry_masked=masked,
        paths=[_path(leaf, segments, fixed) for leaf in leaves],
        path_slots=[leaf["slot"] for leaf in leaves],
        key=NamespaceKey(derive_namespace_key(SECRET, spec)),
    )


def _leaves(segments: list[dict[str, Any]], shared: int) -> list[dict[str, Any]]:
    """Segments in which sequences end that have a copy in each replica: the deepest one and others."""
    parents = {segment["parent"] for segment in segments}
    leaves = [segment for segment in segments[shared:] if segment["slot"] not in parents]
    leaves.sort(key=lambda segment: -int(segment["window"]))
    return leaves[:: max(1, len(leaves) // PATHS)][:PATHS]


def _path(leaf: dict[str, Any], segments: list[dict[str, Any]], fixed: NDArray[np.int64]) -> list[Part]:
    """The sequence that ends with a segment."""
    path = [leaf]
    while path[-1]["parent"]:
        path.append(segments[path[-1]["parent"] - FIRST_SLOT])
    return [
        Part(np.array(segment["ids"], dtype=np.uint64), int(fixed[segment["slot"] - FIRST_SLOT]))
        for segment in reversed(path)
    ]
