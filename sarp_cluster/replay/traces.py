"""Opens trace files: what is packed is unpacked, what is inside is recognised by its content, not by its name.

Known are KTRC (token IDs), coding-agent and Mooncake lines (block IDs), each plain, in one zstd frame or in gzip.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Final

import zstandard

from sarp_cluster import limits
from sarp_cluster.errors import TraceError
from sarp_cluster.replay.block_trace import CodingAgentTrace, MooncakeTrace, parse_coding_agent, parse_mooncake
from sarp_cluster.replay.request import BlockIds, Request, Trace, TraceKind
from sarp_cluster.replay.token_trace import BLOCK_TOKENS_DEFAULT, MAGIC, TokenTrace, parse_ktrc

__all__ = ["BlockIds", "Request", "Trace", "TraceKind", "open_trace", "unpack"]

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_WINDOW_MAX: Final = 2**27
"""Largest window a frame may ask for, as the format says."""
ENDINGS: Final = (".zst", ".gz", ".ktrc", ".jsonl", ".json")


def open_trace(path: Path, *, block_tokens: int | None = None) -> Trace:
    """Read and check the trace in `path`.

    `block_tokens` is the block size in tokens. None means 16 for token traces and the native size for traces of block
    IDs (64 for coding agents, 512 for Mooncake); for the latter it must divide the native size.

    Raises TraceError if the file cannot be read or is not a sound trace, BadRequestError for a bad `block_tokens`.
    """
    raw = unpack(path)
    name = trace_name(path)
    if raw.startswith(MAGIC[:4]):
        tokens = BLOCK_TOKENS_DEFAULT if block_tokens is None else block_tokens
        return TokenTrace(name, parse_ktrc(raw, path), block_tokens=tokens)
    keys = _keys_of_first_line(raw)
    if "hash_ids" in keys:
        return MooncakeTrace(name, parse_mooncake(raw, path), block_tokens=block_tokens)
    if {"s", "a", "k", "b"} <= keys:
        return CodingAgentTrace(name, parse_coding_agent(raw, path), block_tokens=block_tokens)
    raise TraceError(f"{path}: neither a KTRC file nor JSON lines of a known trace")


def trace_name(path: Path) -> str:
    """The file's name without the endings that traces have."""
    name = path.name
    while name.endswith(ENDINGS):
        name = name.rpartition(".")[0]
    return name or path.name


def unpack(path: Path) -> bytes:
    """The file's contents, unpacked. Raises TraceError if it cannot be read, is damaged or over TRACE_BYTES_MAX."""
    try:
        with path.open("rb") as file:
            packed = file.read(limits.TRACE_BYTES_MAX + 1)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if packed.startswith(ZSTD_MAGIC):
        packed = _unpack_zstd(packed, path)
    elif packed.startswith(GZIP_MAGIC):
        packed = _unpack_gzip(path)
    if len(packed) > limits.TRACE_BYTES_MAX:
        raise TraceError(f"{path}: more than {limits.TRACE_BYTES_MAX} bytes")
    return packed


def _unpack_zstd(packed: bytes, path: Path) -> bytes:
    try:
        size = zstandard.frame_content_size(packed)
        if size < 0:
            raise TraceError(f"{path}: the zstd frame does not tell its content size")
        if size > limits.TRACE_BYTES_MAX:
            raise TraceError(f"{path}: unpacks to {size} bytes, more than {limits.TRACE_BYTES_MAX}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX)
        return decompressor.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise TraceError(f"{path}: damaged or truncated zstd frame: {error}") from error


def _unpack_gzip(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read(limits.TRACE_BYTES_MAX + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise TraceError(f"{path}: damaged or truncated gzip file: {error}") from error


def _keys_of_first_line(raw: bytes) -> set[str]:
    try:
        row = json.loads(raw.lstrip().split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return set()
    return set(row) if isinstance(row, dict) else set()
