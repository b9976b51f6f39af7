"""An index that tells what it holds already: what `sarp replay` needs where its store is not empty."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

from sarp_cluster.types import Namespace, Worker, WorkerMark
from shard.contents import Segment, pieces
from shard.index import Index


class ReopenedIndex(Index):
    """See shard.index.Index."""

    def worker_marks(self) -> dict[Worker, WorkerMark]:
        """Every worker's generation and the seq of its last change."""
        workers = self.state.workers
        return {
            Worker(*name): WorkerMark(workers.generation(number), workers.seq(number))
            for number, name in enumerate(workers.names)
        }

    async def held_block_ids(self, namespace: Namespace) -> AsyncIterator[bytes]:
        """Wire IDs of the namespace's blocks of which somebody holds the whole prefix: all that a match can match.

        Predecessors come first. The index must not change meanwhile.
        """
        wanted = self.namespaces.require(namespace)
        await self.stop_background()
        try:
            reach = bytearray(self.state.table.slots_end)  # by slot: leading blocks whose whole prefix is held
            size = self.state.config.segment_blocks
            async for piece in pieces(self.state):
                if piece.segments[0]["namespace"] != wanted.id:
                    continue
                held: list[int] = []
                for segment in piece.segments:
                    end = self._reach(segment, reach, size)
                    reach[segment["slot"]] = end
                    held += segment["ids"][segment["fork"] : end]
                if held:
                    yield wanted.key.wire_ids(struct.pack(f"<{len(held)}Q", *held))
        finally:
            self.start_background()

    def _reach(self, segment: Segment, reach: bytearray, size: int) -> int:
        fork: int = segment["fork"]
        if segment["parent"] and reach[segment["parent"]] < size:
            return 0
        if fork and reach[segment["origin"]] < fork:
            return reach[segment["origin"]]
        held = 0
        for run in segment["runs"]:
            if run["generation"] == self.state.workers.generation(run["worker"]):
                held |= run["mask"]
        behind = held >> fork
        return fork + (~behind & (behind + 1)).bit_length() - 1
