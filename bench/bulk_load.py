"""Writes a store of any size in the log's own format, millions of blocks a second.

    python -m bench.bulk_load                         how fast: 1e7 blocks into a temporary directory
    python -m bench.bulk_load --blocks 1e8 --dir D    keep the store in D (--full: 1e9 blocks)
    python -m bench.bulk_load --shape skewed          thousands of chats, and more, under one prompt

The store is made of replicas of a real index (bench.scale.template). `sarp verify` passes on it, and an index opens it
with the secret `bench.scale.process.SECRET`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from bench.scale.process import SECRET
from bench.scale.template import CHATS, Template, mask_of, of_trace, skewed
from sarp_cluster import limits
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.storage.file_system import DISK
from sarp_cluster.storage.log_tail import LogTail
from sarp_cluster.storage.recovery import header_prefix
from sarp_cluster.storage.store_directory import log_file_name, log_files
from sarp_cluster.storage.verify import verify
from sarp_cluster.testing.replicas import fill_replica
from shard.index import Index

SEGMENTS_A_WRITE: Final = 4_096
SAMPLE: Final = Path(__file__).parents[1] / "examples" / "sample" / "mint_codeact.ktrc.zst"
SHAPE_TRACE: Final = "trace"
SHAPE_SKEWED: Final = "skewed"

Progress = Callable[[int], object]
"""Told how many blocks are written."""


class Loaded(NamedTuple):
    """A store that was written."""

    replicas: int
    segments: int
    blocks: int
    bytes: int


def template_of(shape: str, trace: Path = SAMPLE, limit: int | None = None) -> Template:
    """The template of a shape; of so many requests of the trace, or so many chats."""
    return asyncio.run(skewed(limit or CHATS) if shape == SHAPE_SKEWED else of_trace(trace, limit))


def write_store(directory: Path, template: Template, blocks: float, progress: Progress = lambda _: None) -> Loaded:
    """Write a store of at least so many blocks, and sync it."""
    asyncio.run(_begin(directory, template))
    replicas = template.replicas_for(blocks)
    number = 1 + max(log_files(directory))
    tail = LogTail(limits.LOG_FILE_BYTES_MAX, number, number, verify(directory).last_lsn, header_prefix(64))
    files = _Files(directory, tail)
    batch = SegmentBatch()
    try:
        for replica in range(replicas):
            begin = template.shared if replica else 0
            for at in range(begin, template.segments, SEGMENTS_A_WRITE):
                end = min(at + SEGMENTS_A_WRITE, template.segments)
                slots, mask = template.slots_of(replica), mask_of(replica)
                fill_replica(template.batch, batch, at, end, template.shared, mask, slots)
                tail.append_segments(batch)
                files.write()
            progress(template.blocks_of(1 + replica))
    finally:
        files.close()
    written = sum(path.stat().st_size for path in log_files(directory).values())
    return Loaded(replicas, template.segments_of(replicas), template.blocks_of(replicas), written)


async def _begin(directory: Path, template: Template) -> None:
    """A store without a block, made by the index itself: its namespace and its workers, under their numbers."""
    index = await Index.open(directory, secret=SECRET)
    index.create_namespace(template.spec)
    for worker in template.workers:
        await index.clear_worker(worker, generation=0)
    await index.close()


class _Files:
    """Writes what a log's tail has gathered, and syncs each file once the next one begins."""

    def __init__(self, directory: Path, tail: LogTail) -> None:
        self._directory = directory
        self._tail = tail
        self._descriptors: dict[int, int] = {}
        self._durable_lsn = 0

    def write(self) -> None:
        """Write what has gathered."""
        for number, offset, data in self._tail.begin_write(self._durable_lsn):
            if number not in self._descriptors:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptors[number] = os.open(self._directory / log_file_name(number), flags, 0o600)
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptors[number], data[done:], offset + done)
        self._tail.end_write()
        if len(self._descriptors) > 1:
            self._sync()

    def close(self) -> None:
        """Sync all, the directory too."""
        self.write()
        self._sync()
        DISK.sync_directory(self._directory)
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _sync(self) -> None:
        for descriptor in self._descriptors.values():
            os.fdatasync(descriptor)
        for number in sorted(self._descriptors)[:-1]:
            os.close(self._descriptors.pop(number))
        self._durable_lsn = self._tail.lsn


def main() -> None:
    """Write a store and say how fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=float, default=1e7, help="at least so many (default: %(default)g)")
    parser.add_argument("--full", action="store_true", help="1e9 blocks: 15 GB, some minutes")
    parser.add_argument("--shape", choices=(SHAPE_TRACE, SHAPE_SKEWED), default=SHAPE_TRACE, help="(default: trace)")
    parser.add_argument(
        "--trace", type=Path, default=SAMPLE, help="for the shape `trace` (default: the CodeAct sample)"
    )
    parser.add_argument(
        "--limit", type=int, help="requests of the trace, or chats, of the template (default: all, or 3,000)"
    )
    parser.add_argument("--dir", type=Path, help="where to write it, and keep it (default: a temporary directory)")
    parser.add_argument("--verify", action="store_true", help="look over the store afterwards, as `sarp verify` does")
    options = parser.parse_args()
    template = template_of(options.shape, options.trace, options.limit)
    registrations = len(template.entries)
    print(f"template: {template.blocks:,} blocks in {template.segments:,} segments, {registrations:,} registrations")
    with TemporaryDirectory() as temporary:
        directory = options.dir or Path(temporary) / "store"
        began = perf_counter()
        blocks = 1e9 if options.full else options.blocks
        total = template.blocks_of(template.replicas_for(blocks))
        with tqdm(total=total, unit="block", unit_scale=True, mininterval=0.5, disable=None) as bar:
            loaded = write_store(directory, template, blocks, lambda done: bar.update(done - bar.n))
        took = perf_counter() - began
        print(
            f"{loaded.blocks:,} blocks in {loaded.segments:,} segments, {loaded.bytes:,} bytes "
            f"({loaded.bytes / loaded.blocks:.1f} a block), written and synced in {took:.1f} s: "
            f"{loaded.blocks / took / 1e6:.1f} million blocks a second"
        )
        if options.verify:
            found = verify(directory)
            print(
                f"verified: {found.segments:,} segments, {found.blocks:,} blocks: {'clean' if found.clean else 'BAD'}"
            )


if __name__ == "__main__":
    main()
