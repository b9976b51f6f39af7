"""The settings of one index, validated when they are made. docs/configuration.md describes each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import msgspec

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError

COUNT_MAX = 2**31 - 1
"""Thresholds are below: the core counts in 32 bits, and its highest number stands for none."""

Strategy = Literal["wave", "stepwise"]


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise BadRequestError(f"{field}: {message}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Parameters of SARP (paper §4) and of our additions. The defaults are the design's."""

    segment_blocks: int = 64
    """S: blocks a segment (paper §4.2)."""
    base_points: int = 4
    """R: base routing points a segment, evenly spaced (paper §4.2)."""
    refinement_threshold: int = 256
    """τ: a posting list above it gets a midpoint, in the last interval also the last block (paper §4.2)."""
    pruning_threshold: int = 3
    """A later base point is skipped while the list before it has at most so many candidates (paper §4.4)."""
    retrieval_max: int | None = 3
    """MaxRetrieval: candidates a match retrieves in one window (paper §4.3). None: no cap."""
    filter_bits: int = 128
    """Bits of a filter: 128 (DEVIATION: stride 1, a wide first field) or 64 (the paper's: 8 fields, stride 2)."""
    filter_stride: int | None = None
    """Blocks a filter field covers. None: 1 at 128 bits, 2 at 64 (paper §4.3)."""
    filter_first_bits: int = 16
    """Bits of the first field of a 128-bit filter (8, 16, 24 or 32); the others have 8."""
    refine: bool = True
    filter: bool = True
    prune: bool = True
    strategy: Strategy = "wave"
    """"wave": all reads of a match at once (design §4). "stepwise": the paper's, window by window."""
    routing_key_bits: int = 48
    """Bits of a block ID that serve as routing key. Fewer bits collide more: never a wrong answer, more reads."""
    filter_field_bits: int = 8
    """Bits of a filter field that are used. Below 8 only to force collisions in tests."""
    snapshot_log_bytes: int = 16 * 1024 * 1024
    """Bytes by which the log grows from one snapshot to the next. A restart replays what lies behind the last one."""
    delta_segments_max: int = 4_096
    """Segments with an unfolded delta before the oldest are folded in the background."""
    log_file_bytes: int = limits.LOG_FILE_BYTES_MAX
    reclaim_ratio: float | None = 1.4
    """Bytes of all log files to live ones above which files are rewritten (design §5: at most 1.5). None: never."""
    reclaim_bytes_per_second: int = 64 * 1024 * 1024
    """Bytes that reclaiming reads and writes in a second; more where inserts write more, or the disk is full."""

    def __post_init__(self) -> None:
        s, r = self.segment_blocks, self.base_points
        _require(
            s in (4, 8, 16, 32, 64),
            "segment_blocks",
            f"{s} is not 4, 8, 16, 32 or 64 (limit {limits.SEGMENT_BLOCKS_MAX})",
        )
        _require(
            r >= 1 and s % r == 0 and s // r >= 2, "base_points", f"{r} does not divide {s} into intervals of 2 or more"
        )
        _require(1 <= self.refinement_threshold < COUNT_MAX, "refinement_threshold", f"must be 1 to {COUNT_MAX - 1}")
        _require(
            1 <= self.pruning_threshold < COUNT_MAX,
            "pruning_threshold",
            f"must be 1 to {COUNT_MAX - 1} (prune=False keeps every point)",
        )
        _require(
            self.retrieval_max is None or 1 <= self.retrieval_max < COUNT_MAX,
            "retrieval_max",
            f"must be 1 to {COUNT_MAX - 1}, or None",
        )
        _require(self.filter_bits in (64, 128), "filter_bits", f"{self.filter_bits} is not 64 or 128")
        _require(self.filter_first_bits in (8, 16, 24, 32), "filter_first_bits", "must be 8, 16, 24 or 32")
        if self.filter_bits == 64:
            object.__setattr__(self, "filter_first_bits", 8)  # the paper's layout
        _require(1 <= self.stride <= s, "filter_stride", f"must be 1 to the blocks of a segment ({s})")
        _require(self.strategy in ("wave", "stepwise"), "strategy", f'{self.strategy!r} is not "wave" or "stepwise"')
        _require(1 <= self.routing_key_bits <= 48, "routing_key_bits", "must be 1 to 48")
        _require(1 <= self.filter_field_bits <= 8, "filter_field_bits", "must be 1 to 8")
        _require(
            1 <= self.snapshot_log_bytes <= limits.SNAPSHOT_LOG_BYTES_MAX,
            "snapshot_log_bytes",
            f"must be 1 to {limits.SNAPSHOT_LOG_BYTES_MAX}",
        )
        _require(self.delta_segments_max >= 0, "delta_segments_max", "must be at least 0")
        _require(
            4_096 <= self.log_file_bytes <= limits.LOG_FILE_BYTES_MAX * 64, "log_file_bytes", "must be 4 KiB to 16 GiB"
        )
        _require(
            self.reclaim_ratio is None or 1.1 <= self.reclaim_ratio <= limits.RECLAIM_RATIO_MAX,
            "reclaim_ratio",
            f"must be 1.1 to {limits.RECLAIM_RATIO_MAX}, or None",
        )
        _require(
            limits.RECLAIM_BYTES_PER_SECOND_MIN <= self.reclaim_bytes_per_second <= limits.LOG_FILE_BYTES_MAX * 64,
            "reclaim_bytes_per_second",
            f"must be {limits.RECLAIM_BYTES_PER_SECOND_MIN:,} to {limits.LOG_FILE_BYTES_MAX * 64:,}",
        )

    @property
    def stride(self) -> int:
        """Blocks a filter field covers."""
        if self.filter_stride is not None:
            return self.filter_stride
        return 1 if self.filter_bits == 128 else 2

    @property
    def filter_lead(self) -> int:
        """Blocks at a routing point that its key stands for, so that no field of ours does; 0 in the paper's layout."""
        return 1 if self.filter_bits == 128 and self.stride == 1 else 0

    @property
    def layout(self) -> str:
        """What decides which entries a segment has, in one line: a snapshot made under another is of no use."""
        return (
            f"{self.segment_blocks} blocks, {self.base_points} points, filter {self.filter_bits}/{self.stride}/"
            f"{self.filter_first_bits}/{self.filter_field_bits}/{self.filter}, key {self.routing_key_bits}, "
            f"prune {self.prune}"
        )


def read_index_config(settings: Iterable[str]) -> IndexConfig:
    """The settings of a command line, each NAME=VALUE; `none`: no value. Raises BadRequestError naming the field."""
    hints = get_type_hints(IndexConfig)
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        _require(
            bool(equals) and name in hints, name or "index", f"{setting!r} is not NAME=VALUE with a setting's name"
        )
        try:
            values[name] = msgspec.convert("null" if text == "none" else text, hints[name], strict=False)
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{name}: {text!r}: {error}", field=name) from error
    return IndexConfig(**values)
