from collections.abc import Callable

from sarp_cluster.core.segment import SegmentBatch

class LogTail:
    """The open end of the log, and the reading of segments from all of it."""

    file: int
    offset: int
    lsn: int
    incarnation: int
    bytes_appended: int
    live_bytes: int
    """Of bytes_appended, records that a segment still points to."""
    calls: int
    """Read system calls so far."""
    damaged: int
    """Segments that did not verify."""

    def __init__(
        self,
        file_bytes_max: int,
        incarnation: int,
        file: int,
        lsn: int,
        header: bytes,
        bytes_before: int = 0,
        live_bytes: int = 0,
    ) -> None: ...
    journal: Callable[[], list[bytes]] | None
    """Asked before a group ends: payloads of records of type ROUTING."""

    def append_journal(self) -> None: ...
    @property
    def unwritten_bytes(self) -> int: ...
    def set_descriptor(self, file: int, descriptor: int) -> None: ...
    def append_record(self, kind: int, payload: bytes) -> int: ...
    def append_segments(self, writes: SegmentBatch) -> None: ...
    def begin_write(self, durable_lsn: int) -> list[tuple[int, int, memoryview]]: ...
    def end_write(self) -> None: ...
    def read_cached(self, batch: SegmentBatch) -> int: ...
    def read_wait(self, batch: SegmentBatch) -> None: ...
