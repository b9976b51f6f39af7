"""The segment store as the index sees it: a few operations, so that one index runs over several stores (paper §5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from sarp_cluster.core.segment import SegmentBatch


class StoreStatistics(NamedTuple):
    """Counters of a segment store."""

    disk_bytes: int
    """Bytes written or about to be."""
    live_bytes: int
    """Of those, records that a segment still points to."""
    damaged: int
    """Segments read that did not verify."""
    read_calls: int
    """Read system calls."""


class SegmentStore(Protocol):
    """Where segments stand on disk. Owned by one thread; only `read_wait` may run in a helper thread.

    A record never changes where it stands: a segment that changes is written anew and its place in the segment table
    changes. So a place that was read stays good for as long as its reader likes, if that has told of itself
    (`begin_read`).
    """

    def put(self, writes: SegmentBatch, *, reclaiming: bool = False) -> None:
        """Take changed segments, all or none, and note in each where it stands.

        Readable at once, durable after `sync`. With `reclaiming`, space that is kept back for that may be used.
        """

    def read_cached(self, batch: SegmentBatch) -> int:
        """Read what needs no wait. Returns how many segments are left to read."""

    def read_wait(self, batch: SegmentBatch) -> None:
        """Read what is left, waiting for the disk. What does not verify is marked damaged."""

    def begin_read(self) -> int:
        """A helper thread is about to read. What segments point to now stays readable until `end_read`."""

    def end_read(self, read: int) -> None:
        """It is done; `read` is what `begin_read` returned."""

    def put_namespace(self, namespace_id: int, fields: tuple[str, ...], block_size: int, key_check: bytes) -> None:
        """Record a namespace; `key_check` (8 bytes) tells later whether a key is its key."""

    def put_worker(self, worker: int, instance_id: str, dp_rank: int) -> None:
        """Record a worker under its index."""

    def put_worker_mark(self, worker: int, generation: int, seq: int) -> None:
        """Record a worker's generation and the highest seq applied (-1: none)."""

    def put_removal(self, row: Mapping[str, int]) -> None:
        """Record that a segment, which had this row and cannot be read, is gone."""

    def put_lost(self, *places: int) -> None:
        """Record that what stands at these places need not be read: a damaged segment is gone, or was written anew."""

    def append_journal(self) -> None:
        """Put the routing changes so far, which `journal` has, into the log."""

    journal: Callable[[], Iterable[bytes]] | None
    """Asked before each group of records ends: routing changes to go with it."""

    def note_dead(self, places: memoryview[int]) -> None:
        """Places of records that no segment points to any more, found while rows of a snapshot were loaded."""

    def keep_from(self, number: int) -> None:
        """Log files from this number on are needed by the oldest kept snapshot."""

    @property
    def position(self) -> tuple[int, int]:
        """Where the next record will stand, unless its file is full: (file, offset)."""

    @property
    def log_files(self) -> tuple[int, ...]:
        """The log files there are, in order, the present one last."""

    async def room(self) -> None:
        """Wait until more may be put: what is not written yet is bounded."""

    async def sync(self) -> None:
        """Make all that was put durable. Raises StorePoisonedError, StoreFullError."""

    @property
    def full(self) -> bool:
        """Is what is new refused for lack of space?"""

    @property
    def bytes_appended(self) -> int:
        """Bytes put since the store was opened."""

    @property
    def lsn(self) -> int:
        """LSN of the last record put."""

    @property
    def durable_lsn(self) -> int:
        """LSN through which all records are durable."""

    def poison(self, error: OSError) -> None:
        """The disk has failed elsewhere in this store: nothing is acknowledged any more."""

    def damaged_reads(self) -> int:
        """Times that a segment which was read did not verify."""

    @property
    def failure(self) -> OSError | None:
        """What poisoned it."""

    def statistics(self) -> StoreStatistics:
        """Counters at this moment."""

    async def close(self) -> None:
        """Write out everything and let go of the files."""
