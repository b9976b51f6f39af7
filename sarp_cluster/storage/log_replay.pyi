from typing import NamedTuple

from typing_extensions import Buffer

from sarp_cluster.core.segment_table import SegmentTable

class Senseless(NamedTuple):
    """A record of a whole group that verifies but cannot be: what it changes is not there, or not as it says."""

    file: int
    offset: int
    lsn: int

class LogReplay:
    """One replay, over one file after the other."""

    lsn: int
    """Of the last record that verified."""
    applied_lsn: int
    """Of the last whole group: through it everything is in the table."""
    applied_file: int
    applied_offset: int
    """Where the last whole group ends."""
    segment_bytes: int
    """Bytes of the images and deltas that were replayed."""
    others: list[tuple[int, bytes]]
    """(type, payload) of all records but segments, routing and groups."""
    routing: list[bytes]
    """Payloads of routing records; in a tail only."""
    senseless: list[Senseless]
    gaps: bool
    """Files are missing that were reclaimed: what they had was written anew."""

    def __init__(
        self, table: SegmentTable, *, lsn: int = 0, file: int = 0, offset: int = 0, tail: bool = False
    ) -> None: ...
    @property
    def staged_records(self) -> int: ...
    def resume(self, lsn: int, *, reclaimed: bool = False) -> None: ...
    def skip(self) -> None: ...
    def feed(self, data: Buffer, file: int, begin: int = 0, base: int = 0) -> int: ...
    def missing_images(self) -> list[int]: ...

def highest_mark(data: Buffer, begin: int, file: int) -> int:
    """The highest durable LSN that a record vouches for that verifies in `data`, a log file from offset `begin` on."""

def lost_places(data: Buffer, file: int) -> list[int]:
    """The places that records in `data`, a log file, say need not be read."""

def live_bytes(table: SegmentTable) -> int:
    """Bytes of all records that a segment points to."""

def next_record(data: Buffer, begin: int, file: int) -> tuple[int, int]:
    """(offset, LSN) of the first record at or behind `begin` that verifies; (length, 0) if there is none."""
