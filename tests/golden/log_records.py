"""One log with a record of every kind, made by today's code, and the golden files that hold its bytes.

A golden file holds one record as hexadecimal text, 16 bytes a line. `python -m tests.golden.log_records` writes them
anew. Do that only together with a new version of the format (docs/formats.md): logs written before must stay readable
or be refused by their version.
"""

from __future__ import annotations

import asyncio
import struct
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

from sarp_cluster.storage.record import RecordHeader, read_frame
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.testing.segments import make_batch, pack_place
from sarp_cluster.testing.stores import open_log_store

GOLDEN: Final = Path(__file__).parent / "log-v3"
OLDER: Final = tuple(Path(__file__).parent / name for name in ("log-v1", "log-v2"))
"""Those of older versions, which are read and not written any more."""
FRAME_BYTES: Final = 32
KEY_CHECK: Final = bytes.fromhex("c0 c1 c2 c3 c4 c5 c6 c7")
IMAGE, DELTA = 1, 2

NAMES: Final = (
    "file-header", "namespace", "worker", "worker-other", "worker-mark", "image", "image-base", "delta-extension",
    "delta-locations", "reclaimed", "removal", "lost", "routing", "group", "group-closing",
)  # fmt: skip

FIRST: Final[dict[str, Any]] = {
    "slot": 256,
    "tag": 0,
    "window": 0,
    "namespace": 1,
    "ids": [0x1111111111111111, 0x2222222222222222, 0x3333333333333333],
    "runs": [
        {"worker": 0, "generation": 7, "tier": 0, "mask": 0b111, "handle": 0xFEDCBA9876543210},
        {"worker": 1, "generation": 0, "tier": 2, "mask": 0b101, "handle": None},
    ],
}
"""A segment of three blocks. Worker 0 holds all on its GPU and gave a handle, worker 1 the first and the third."""

FORKED: Final[dict[str, Any]] = {
    "slot": 259,
    "tag": 2,
    "window": 1,
    "namespace": 1,
    "parent": 258,
    "parent_tag": 9,
    "origin": 257,
    "origin_tag": 5,
    "fork": 1,
    "ids": [0x0101010101010101, 0x0202020202020202],
    "runs": [{"worker": 1, "generation": 0, "tier": 1, "mask": 0b10, "handle": None}],
}
"""A segment that shares its first block with its origin and has a parent."""

EXTENDED: Final[dict[str, Any]] = FORKED | {
    "ids": [*FORKED["ids"], 0x0303030303030303],
    "image_count": 2,
    "count_before": 2,
    "runs": [{"worker": 1, "generation": 0, "tier": 1, "mask": 0b110, "handle": None}],
}
"""The same with a block more, as image and delta."""

HELD: Final[dict[str, Any]] = EXTENDED | {
    "count_before": 3,
    "runs": [
        {"worker": 0, "generation": 7, "tier": 0, "mask": 0b10, "handle": 5},
        *EXTENDED["runs"],
    ],
}
"""That held by one more worker: no new block. Its delta replaces the one before."""

GONE: Final = {
    **{name: FORKED[name] for name in ("slot", "tag", "fork", "parent", "origin")},
    "count": 3,
    "image": pack_place(1, 280, 136),
    "delta": 0,
}
"""Its row, had it been damaged and taken out; its image is said to stand where the first segment's does."""

POSTINGS: Final = (
    (0x1111111111110000, 0xAABB000000000000, 0x00000000000000CC, 4096),
    (0x1111111111110000, 0xAA00000000000000, 0, 4096 | 0x80000000),
    (0x1111111111110000, 0, 0, 2),
)
"""What changes where a segment is extended: its new filter, its old one, and that the next base point is there."""


class Written(NamedTuple):
    """A record of the log."""

    header: RecordHeader
    data: bytes


async def _write_log(directory: Path) -> None:
    store = await open_log_store(directory)
    store.put_namespace(1, ("acme", "llama-3", "", "Zürich", "xxh3"), 16, KEY_CHECK)
    store.put_worker(0, "gpu-node-7", 3)
    store.put_worker(1, "w", 0)
    store.put_worker_mark(0, 7, -1)
    store.put(make_batch([FIRST, FORKED]))
    store.put(make_batch([EXTENDED | {"write": DELTA}]))
    store.put(make_batch([HELD | {"write": DELTA, "delta": 8}]))
    store.put_reclaimed(7)
    store.put_removal(GONE)
    store.put_lost(GONE["image"], GONE["delta"])
    routing = struct.pack("<IiiI", len(POSTINGS), 0, 0, 0) + b"".join(struct.pack("<QQQI", *one) for one in POSTINGS)
    journal = [routing]
    store.journal = lambda: [journal.pop()] if journal else []
    await store.close()


def split(log: bytes, file: int = 1) -> list[Written]:
    """The records of a log file, one after the other to its end."""
    records = []
    at = 0
    while at < len(log):
        header = read_frame(log, at, file, at)
        assert header is not None, f"no record at {at}"
        end = at + (FRAME_BYTES + header.payload_bytes + 7) // 8 * 8
        records.append(Written(header, log[at:end]))
        at = end
    return records


def write_records() -> dict[str, Written]:
    """What today's code writes, by name."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_write_log(Path(directory) / "log"))
        log = (Path(directory) / "log" / log_file_name(1)).read_bytes()
    return dict(zip(NAMES, split(log), strict=True))


def read_golden(name: str, directory: Path = GOLDEN) -> bytes:
    """The bytes of a golden file."""
    return bytes.fromhex((directory / f"{name}.hex").read_text())


def main() -> None:
    """Write the golden files anew."""
    GOLDEN.mkdir(exist_ok=True)
    for name, record in write_records().items():
        lines = [record.data[at : at + 16].hex(" ") for at in range(0, len(record.data), 16)]
        (GOLDEN / f"{name}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
