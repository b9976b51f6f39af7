"""Signed records made by today's code: a slot map, entries, a shard, and the digest of all.

`python -m tests.golden.signed_records` writes them anew. Do that only together with a new version of the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sarp_cluster.cluster.registry import Entry, TenantEntry
from sarp_cluster.cluster.signed_records import Signer
from tests.golden.record_files import ENTRIES, SHARD, SLOT_MAP

GOLDEN: Final = Path(__file__).parent / "redis-v1"
SECRET: Final = bytes(range(32))
CLUSTER: Final = "0123456789abcdef"
PREFIX: Final = f"sarp:{{{CLUSTER}}}:"
EXAMPLE: Final[Entry] = TenantEntry(7, "acme", 1)
FIELDS: Final = (b"namespace\0chat", b"worker\x001\0node-a", "tenant\0Zürich".encode())


def example() -> bytes:
    """The example of the document."""
    return Signer(SECRET, CLUSTER).seal(f"{PREFIX}entries", EXAMPLE, b"tenant\0acme")


def write_records() -> dict[str, bytes]:
    """Each by its name."""
    signer = Signer(SECRET, CLUSTER)
    records = {"slot_map": signer.seal(f"{PREFIX}slot_map", SLOT_MAP.packed())}
    for number, (field, entry) in enumerate(zip(FIELDS, ENTRIES, strict=True)):
        records[f"entry-{number}"] = signer.seal(f"{PREFIX}entries", entry, field)
    records["shard"] = signer.seal(f"{PREFIX}shards", SHARD, SHARD.shard.encode())
    digest = signer.digest()
    for raw in records.values():
        digest = digest.changed(None, raw)
    return {**records, "digest": digest.seal()}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, raw in write_records().items():
        (GOLDEN / name).write_bytes(raw)
