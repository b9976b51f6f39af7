from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from typing_extensions import Buffer

class RecordType(IntEnum):
    """What a record of the log says."""

    IMAGE = 1
    DELTA = 2
    NAMESPACE = 3
    WORKER = 4
    WORKER_MARK = 5
    FILE_HEADER = 6
    GROUP = 7
    ROUTING = 8
    RECLAIMED = 9
    REMOVAL = 10
    LOST = 11

class RecordHeader(NamedTuple):
    """A verified frame."""

    type: int
    payload_bytes: int
    lsn: int
    file: int
    offset: int
    incarnation: int

def frame_record(kind: int, payload: bytes, lsn: int, file: int, offset: int, incarnation: int) -> bytes:
    """A whole record of any type, padded to 8 bytes."""

def pack_removal(row: Mapping[str, int]) -> bytes:
    """Payload of the REMOVAL record of a segment that cannot be read, given its row (SegmentTable.describe)."""

def pack_removal_again(slot: int) -> bytes:
    """Payload of a REMOVAL record that says again that a slot is free."""

def read_frame(data: Buffer, at: int, file: int, offset: int) -> RecordHeader | None:
    """The verified header of the record at data[at:], which stands at `offset` of log file `file`; None if it fails."""
