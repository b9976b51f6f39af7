from typing import NamedTuple

from typing_extensions import Buffer

from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.core.segment_table import SegmentTable

class FileScan(NamedTuple):
    """What a stretch of a log file says."""

    segments: bytes
    """Records of segments, for `live_slots`."""
    others: list[tuple[int, int]]
    """(type, the number that the payload begins with) of the other records, each once: not headers, groups, routing.
    Of one that tells of a lost record: its place."""
    end: int
    """Offset at which the next stretch begins."""
    damaged: bool
    """Something in it did not verify."""

def scan(data: Buffer, file: int, begin: int, last: bool) -> FileScan:
    """The records in `data`, which stands at offset `begin` of a log file; `last`: the file ends with it."""

def live_slots(table: SegmentTable, segments: bytes) -> list[int]:
    """The segments, each once, that still point to one of the records that a scan found."""

def still_in(table: SegmentTable, slots: list[int], file: int) -> list[int]:
    """Of these segments, those with a record in this file."""

def slots_in(table: SegmentTable, file: int, begin: int, rows: int) -> tuple[list[int], int]:
    """The segments among `rows` rows from `begin` on with a record in this file; the slot to go on from, 0: the end."""

def free_slots(table: SegmentTable) -> list[int]:
    """The slots that were used and are free. All of the table must be loaded."""

def unreadable(batch: SegmentBatch) -> list[int]:
    """The slots of the segments in a batch that are damaged."""
