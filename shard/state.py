"""What one index consists of: the compiled core, its tables and its store, put together once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.answering import Answering
from sarp_cluster.core.insertion import Insertion
from sarp_cluster.core.matching import Search
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.routing_points import RoutingPoints
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.core.worker_table import WorkerTable
from sarp_cluster.storage.segment_store import SegmentStore
from shard.loading import Loader

READ_THREADS: Final = 16
"""Matches and inserts that may wait for the disk at once, one helper thread each; further ones queue."""

IDLE_MAX: Final = 32
"""Finished searches and insertions kept for their buffers."""


class IndexState:
    """The parts of one index. Owned by the thread of its event loop; helper threads only read segments into a batch."""

    def __init__(self, config: IndexConfig, store: SegmentStore, table: SegmentTable) -> None:
        self.config = config
        self.store = store
        self.parameters = SarpParameters(config)
        self.directory = RoutingDirectory(self.parameters)
        self.points = RoutingPoints(self.parameters, self.directory)
        self.table = table
        self.loader = Loader(self.directory, table, store)
        self.workers = WorkerTable()
        self.live_mask: Callable[[], bytes | None] = lambda: None
        """One byte a worker, 1 where its locations count; None: all do. A shard of a cluster sets it."""
        self.answering = Answering(self.workers)
        self.readers = ThreadPoolExecutor(READ_THREADS, "sarp-read")
        self.healed = 0
        """Segments that were repaired, or healed by inserts, since the index was opened."""
        self.repairing = asyncio.Lock()
        """Held across our own reads only (shard.repair)."""
        self.idle_searches: deque[Search] = deque(maxlen=IDLE_MAX)
        self.idle_insertions: deque[Insertion] = deque(maxlen=IDLE_MAX)

    @property
    def table_unloaded(self) -> bool:
        """Are there rows of the segment table that were not read yet since the store was opened?"""
        return self.table.unloaded_pages > 0

    def search(self) -> Search:
        """A search to use; give it back to `idle_searches` once nothing reads into it any more."""
        if self.idle_searches:
            return self.idle_searches.pop()
        return Search(self.parameters, self.directory, self.points, self.table)

    def insertion(self) -> Insertion:
        """An insertion to use, as `search`."""
        if self.idle_insertions:
            return self.idle_insertions.pop()
        search = Search(self.parameters, self.directory, self.points, self.table)
        return Insertion(search, self.points, self.table, self.workers)

    async def wait_for(self, batch: SegmentBatch) -> None:
        """Read what is left of a batch in a helper thread.

        When this is cancelled the thread goes on, so a cancelled caller must not give its batch back for another use.
        The files that it reads from stay open until it is done; a read that had not begun when it was cancelled is left
        out.
        """
        read = _Read(self.store, batch)
        running = asyncio.get_running_loop().run_in_executor(self.readers, read)
        running.add_done_callback(read.end)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            read.wanted = False
            raise


class _Read:
    """A batch that a helper thread is to read."""

    __slots__ = ("_batch", "_number", "_store", "wanted")

    def __init__(self, store: SegmentStore, batch: SegmentBatch) -> None:
        self._store = store
        self._batch = batch
        self._number = store.begin_read()
        self.wanted = True

    def __call__(self) -> None:
        if self.wanted:
            self._store.read_wait(self._batch)

    def end(self, _: object) -> None:
        """The thread is done with it."""
        self._store.end_read(self._number)
