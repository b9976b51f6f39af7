from typing import Any

class SegmentBatch:
    """Segments that are read or written together. Buffers are kept for the next use."""

    def __len__(self) -> int: ...
    def describe(self) -> list[dict[str, Any]]: ...
