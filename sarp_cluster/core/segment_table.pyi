class SegmentTable:
    """All segments of one index. Owned by one thread."""

    segments: int
    blocks: int
    """Blocks, each at its home."""
    block_entries: int
    """Block IDs stored, copies counted."""
    deltas: int
    """Segments with a delta that is not folded."""
    version: int
    """Grows with each change: an insert that waited for the disk compares it."""

    def __init__(self) -> None: ...
    @property
    def slots_end(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def slots_with_delta(self, begin: int, rows: int, limit: int) -> tuple[list[int], int]: ...
    def describe(self, slot: int) -> dict[str, int] | None: ...
    def validate(self, segment_blocks: int) -> None: ...
