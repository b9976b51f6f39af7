from collections.abc import Iterable

from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.core.segment_table import SegmentTable

def set_state(directory: RoutingDirectory, key: int, point: int, state: int) -> None:
    """Set the state of the points behind a point of an entry."""

def probe(directory: RoutingDirectory, key: int, point: int) -> tuple[bool, int]:
    """(is there a live posting under the key, state of the points behind the point)."""

def slots_after(
    directory: RoutingDirectory, key: int, high: int, low: int, slot: int, limit: int
) -> list[tuple[int, int, int]]:
    """Up to `limit` live postings of a list behind one of them, as (high, low, slot); slot 0: from its beginning."""

def allocate(table: SegmentTable) -> tuple[int, int]:
    """(slot, tag) of a free slot."""

def release(table: SegmentTable, slot: int) -> None:
    """Give back a slot that was allocated and not stored."""

def store(table: SegmentTable, batch: SegmentBatch) -> None:
    """Enter the segments of a batch."""

def remove(table: SegmentTable, slot: int, stale: bool = False) -> None:
    """Take out a segment that has no children. `stale`: its postings are still there."""

def end_stale(table: SegmentTable, slot: int) -> None:
    """No posting of a stale slot is left."""

def load(table: SegmentTable, slots: Iterable[int]) -> SegmentBatch:
    """A batch of what the table knows of these segments."""

def row(table: SegmentTable, slot: int) -> bytes | None:
    """The 40 bytes of a row as searches see it, or None if its page is not loaded, which is then noted as missed."""

def replay_images(table: SegmentTable, batch: SegmentBatch, had_delta: bool = False) -> bool:
    """Replay the segments of a batch as images behind a snapshot. False at the first that makes no sense."""

def replay_deltas(table: SegmentTable, batch: SegmentBatch, had_delta: bool = False) -> bool:
    """The same as deltas: slot, tag, namespace, delta and count of each count."""

def replay_removals(table: SegmentTable, batch: SegmentBatch, stale: bool = False) -> bool:
    """Replay that the segments of a batch are gone."""
