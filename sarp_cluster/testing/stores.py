"""Stores and indexes for tests that look beneath the index."""

from __future__ import annotations

from pathlib import Path

from sarp_cluster import limits
from sarp_cluster.storage.log import LogStore


async def open_log_store(
    directory: Path,
    *,
    segment_blocks: int = limits.SEGMENT_BLOCKS_MAX,
    file_bytes_max: int = limits.LOG_FILE_BYTES_MAX,
) -> LogStore:
    """The log store in `directory`, new or recovered."""
    store, _ = await LogStore.open(directory, segment_blocks=segment_blocks, file_bytes_max=file_bytes_max)
    return store
