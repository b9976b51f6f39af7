from collections.abc import Iterable, Mapping
from typing import Any

from sarp_cluster.core.segment import SegmentBatch

def make_batch(segments: Iterable[Mapping[str, Any]]) -> SegmentBatch:
    """A batch of segments that are known whole, ready to be written.

    Keys as in SegmentBatch.describe, and `parent_tag`, `origin_tag`, `write` (1 an image, 2 a delta). `slot` and `ids`
    are required.
    """

def make_unread_batch(segments: Iterable[Mapping[str, Any]]) -> SegmentBatch:
    """A batch of the same segments as the segment table knows them: their records are still to be read."""

def encode_segment(batch: SegmentBatch, item: int, lsn: int, file: int, offset: int, incarnation: int) -> bytes:
    """The record that an item's `write` asks for, as it would stand at this place."""

def decode_segment(
    batch: SegmentBatch, item: int, image: tuple[bytes, int, int], delta: tuple[bytes, int, int] | None = None
) -> int:
    """Fill an item from its records, checked as the log checks them. Returns its state (1 read, 2 damaged).

    A record is given as its bytes, and the file and offset where it stands.
    """

def pack_place(file: int, offset: int, length: int) -> int:
    """A place in the log as one integer."""

def unpack_place(place: int) -> tuple[int, int, int]:
    """(file, offset, length) of a place."""
