from typing_extensions import Buffer

from sarp_cluster.core.segment_table import SegmentTable

def replay(
    table: SegmentTable,
    data: Buffer,
    file: int,
    lsn: int,
    others: list[tuple[int, bytes]],
    begin: int = 0,
    gaps: bool = False,
) -> tuple[int, int]:
    """Enter the segments of a log file in `table`, collect its other records. Returns (offset, LSN) where it ended."""

def highest_mark(data: Buffer, begin: int, file: int) -> int:
    """The highest durable LSN that any record behind `begin` that verifies vouches for; 0: none does."""

def live_bytes(table: SegmentTable) -> int:
    """Bytes of all records that a segment points to."""

def next_record(data: Buffer, begin: int, file: int) -> tuple[int, int]:
    """(offset, LSN) of the first record at or behind `begin` that verifies; (length, 0) if there is none."""
