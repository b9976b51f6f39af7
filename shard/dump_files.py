"""From a store to a dump's file and back, each whole or not at all: what `sarp dump` and `sarp load` run."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError
from sarp_cluster.storage.file_system import DISK
from sarp_cluster.storage.verify import config_for, store_segment_blocks
from shard.dump import dump
from shard.index import Index
from shard.load import SEQUENCES_A_TURN, Loader, segment_blocks_of

WRITE_BYTES: Final = 1 << 20
READ_BYTES: Final = 1 << 20
LOADING_NAME: Final = "loading"
"""Where a store stands while it is loaded, in its own directory: what has such a thing in it is no store yet."""

Progress = Callable[[int], object]
"""Told how many segments (dump) or bytes (load) more are done."""
Begin = Callable[[int], Progress]
"""Told how many segments there are in all; gives what is to be told how many are done."""


async def dump_store(directory: Path, output: BinaryIO, secret: bytes | None, begin: Begin) -> None:
    """Write the dump of a store that nobody has open. The store is opened, and so recovered, but not changed."""
    segment_blocks = await asyncio.to_thread(store_segment_blocks, directory)
    index = await Index.open(directory, config_for(segment_blocks), secret=secret)
    try:
        await index.stop_background()
        progress = begin(index.statistics().segments)
        waiting = io.BytesIO()
        async for line in dump(index, progress):
            waiting.write(line)
            if waiting.tell() >= WRITE_BYTES:
                await asyncio.to_thread(output.write, waiting.getvalue())
                waiting = io.BytesIO()
        await asyncio.to_thread(output.write, waiting.getvalue())
        await asyncio.to_thread(output.flush)
    finally:
        await index.close()


async def load_store(directory: Path, source: BinaryIO, secret: bytes | None, progress: Progress) -> Loader:
    """Make the store of a dump in a directory that is empty or absent. What fails leaves nothing behind.

    Raises BadRequestError if there is something in the directory, DumpError for what cannot be loaded.
    """
    made = await asyncio.to_thread(_begin, directory)
    try:
        loader = await _load(directory / LOADING_NAME, source, secret, progress)
        await asyncio.to_thread(_finish, directory)
    except BaseException:
        await asyncio.to_thread(_undo, directory, made)
        raise
    return loader


async def _load(directory: Path, source: BinaryIO, secret: bytes | None, progress: Progress) -> Loader:
    lines = await asyncio.to_thread(_lines, source)
    segment_blocks = segment_blocks_of(lines[0] if lines else b"")
    index = await Index.open(directory, config_for(segment_blocks), secret=secret)
    try:
        loader = Loader(index)
        while lines:
            for line in lines:
                await loader.take(line)
                progress(len(line))
                if loader.sequences % SEQUENCES_A_TURN == 0:
                    await asyncio.sleep(0)
            lines = await asyncio.to_thread(_lines, source)
        loader.finish()
        await index.drain_backfill()
    finally:
        await index.close()
    return loader


def _lines(source: BinaryIO) -> list[bytes]:
    """Some lines more. One that is longer than any may be is cut off, and then refused."""
    lines: list[bytes] = []
    size = 0
    while size < READ_BYTES and (line := source.readline(limits.DUMP_LINE_BYTES_MAX + 1)):
        lines.append(line)
        size += len(line)
    return lines


def _begin(directory: Path) -> bool:
    """Make the place where the store is loaded. Was the directory made for it?"""
    made = not directory.exists()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        there = next(directory.iterdir(), None)
        if there is not None:
            hint = ", which a load left that was cut off: remove it" if there.name == LOADING_NAME else ""
            raise BadRequestError(
                f"{directory} is not empty: it has {there.name} in it{hint}; a dump is loaded into an empty directory",
                field="directory",
            )
        (directory / LOADING_NAME).mkdir(mode=0o700)
    except FileExistsError:
        raise BadRequestError(f"{directory}: another process loads a dump into it", field="directory") from None
    return made


def _finish(directory: Path) -> None:
    """Let the loaded store take its place. Until the last step the directory is no store."""
    loading = directory / LOADING_NAME
    for path in sorted(loading.iterdir()):
        path.rename(directory / path.name)
    DISK.sync_directory(directory)
    loading.rmdir()
    DISK.sync_directory(directory)


def _undo(directory: Path, made: bool) -> None:
    """Remove what a load that failed has left, so that it can be tried again."""
    shutil.rmtree(directory / LOADING_NAME, ignore_errors=True)
    if made:
        try:
            directory.rmdir()
        except OSError:
            pass  # somebody else has put something there since
