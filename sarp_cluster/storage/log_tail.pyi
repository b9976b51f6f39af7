from collections.abc import Callable, Iterable

from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.storage.log_files import LogFiles

class LogTail:
    """The open end of the log, and the reading of segments from all of it."""

    file: int
    offset: int
    lsn: int
    incarnation: int
    file_bytes_max: int
    bytes_appended: int
    """Bytes appended since this object was made."""
    files: LogFiles
    """The books of all log files."""
    journal: Callable[[], Iterable[bytes]] | None
    """Asked before a group of records ends: payloads of records of type ROUTING that belong into it."""
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
        files: LogFiles | None = None,
    ) -> None: ...
    @property
    def unwritten_bytes(self) -> int: ...
    def set_descriptor(self, file: int, descriptor: int) -> None: ...
    def append_record(self, kind: int, payload: bytes) -> int: ...
    def append_segments(self, writes: SegmentBatch) -> None: ...
    def append_journal(self) -> None: ...
    def next_file(self) -> None: ...
    def begin_write(self, durable_lsn: int, vouch: bool = False) -> list[tuple[int, int, memoryview]]: ...
    def end_write(self) -> None: ...
    def read_cached(self, batch: SegmentBatch) -> int: ...
    def read_wait(self, batch: SegmentBatch) -> None: ...
