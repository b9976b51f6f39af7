"""What the driver sends: sessions of two public traces, of which three shards get a fair share each.

`sharegpt_short` has thousands of different first blocks; `service_chat` has 44, of which ten get half of its requests.
Everything here follows from the files and a fixed secret, so that driver, oracle and test agree without talking.
SARP_TRACES=DIR takes whole traces from there instead of the cuts that come with us (traces/README.md).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from sarp_cluster.cluster.placement import stretches
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.core.block_id import NamespaceKey, xxh3_block_ids
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.limits import SEGMENT_BLOCKS_MAX
from sarp_cluster.replay.request import BLOCK_ID_BYTES
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import NamespaceSpec

ROOT: Final = Path(__file__).parents[2]
SECRET: Final = b"chaos: where blocks are placed is the same in each run"
SPEC: Final = NamespaceSpec(model="chaos")
SHARDS: Final = ("shard-0", "shard-1", "shard-2")
SPLIT_EACH: Final = 2
"""Of the sequences that are longer than a segment, one in so many is cut behind it: two shards may have to answer."""


class Turn(NamedTuple):
    """Blocks to match, then blocks of the sequence to insert."""

    context: int
    sequence: int


class Session(NamedTuple):
    """One conversation."""

    trace: str
    ids: bytes
    """Of all its blocks."""
    turns: tuple[Turn, ...]

    @property
    def blocks(self) -> int:
        return len(self.ids) // BLOCK_ID_BYTES

    def prefix(self, blocks: int) -> bytes:
        return self.ids[: blocks * BLOCK_ID_BYTES]

    def block_ids(self) -> list[int]:
        return memoryview(self.ids).cast("Q").tolist()


def traces() -> list[Path]:
    """The files."""
    whole = os.environ.get("SARP_TRACES")
    if whole:
        return [Path(whole) / f"{name}.ktrc.zst" for name in ("sharegpt_short", "service_chat")]
    return [
        ROOT / "examples" / "sample" / "sharegpt_short.ktrc.zst",
        Path(__file__).parent / "traces" / "service_chat.ktrc.zst",
    ]


def sessions() -> list[Session]:
    """All sessions that have a block; a session's number is its place here."""
    found: list[Session] = []
    for path in traces():
        trace = open_trace(path)
        ids: dict[int, bytes] = {}
        turns: dict[int, list[Turn]] = {}
        for request in trace.requests(lambda tokens: xxh3_block_ids(tokens, SPEC.block_size)):
            ids[request.session] = request.sequence
            turns.setdefault(request.session, []).append(Turn(request.context_blocks, request.sequence_blocks))
        found += [Session(trace.name, ids[one], tuple(turns[one])) for one in sorted(ids) if ids[one]]
    return found


def namespace_key() -> NamespaceKey:
    """Of the namespace that all of it is in."""
    return NamespaceKey(derive_namespace_key(SECRET, SPEC))


def splits(every: list[Session]) -> dict[int, int]:
    """The split table."""
    key = namespace_key()
    long = {key.internal_id(one.ids, 0) for one in every if one.blocks > SEGMENT_BLOCKS_MAX}
    return dict.fromkeys(sorted(long)[::SPLIT_EACH], SEGMENT_BLOCKS_MAX)


class Placement:
    """Who owns what."""

    def __init__(self, every: list[Session]) -> None:
        self._key = namespace_key()
        self._map = SlotMap.first(SHARDS, bytes(NONCE_BYTES), splits(every))

    def owners(self, ids: bytes) -> list[str]:
        """The shards that own a sequence's stretches."""
        return [one.shard for one in stretches(ids, self._key, self._map)]
