"""Record files made by today's code: one of some text, a coordinator's records, a node's view.

`python -m tests.golden.record_files` writes them anew. Do that only together with a new version of a format.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import ShardRecord
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.cluster.view_file import ShardPlace, ViewContent, save_view
from sarp_cluster.storage.record_file import encode
from sarp_cluster.types import HashProfile, NamespaceSpec

GOLDEN: Final = Path(__file__).parent / "record-v1"
TEXT: Final = b"what was written last"
SLOT_MAP: Final = SlotMap.first(["s1", "s0"], bytes(range(16)), {2**64 - 1: 128})
ENTRIES: Final[list[Entry]] = [
    NamespaceEntry(1, "chat", NamespaceSpec(tenant="Zürich", model="m", lora="l", hash_profile=HashProfile.OPAQUE)),
    WorkerEntry(3, "node-a", 1, "credential", 2, 5_000, True, False),
    TenantEntry(4, "Zürich", 1),
]
NUMBER: Final = 5
SHARD: Final = ShardRecord(shard="s0", store="directory", incarnation="process", http="", stream="127.0.0.1:7000")
VIEW: Final = ViewContent.of(
    "cluster", SLOT_MAP, Registry(ENTRIES, NUMBER), [ShardPlace(shard="s0", http="127.0.0.1:80", stream="[::1]:7000")]
)


class Memory:
    """A RecordStore without a disk."""

    def __init__(self, content: bytes | None = None) -> None:
        self.content = content

    async def read(self) -> bytes | None:
        return self.content

    async def write(self, content: bytes) -> None:
        self.content = content

    async def close(self) -> None:
        pass


async def _contents() -> dict[str, bytes]:
    records, view = Memory(), Memory()
    membership = await EmbeddedMembership.open(records)
    await membership.put_slot_map(SLOT_MAP, expected=None)
    await membership.put_entries(ENTRIES, NUMBER)
    await membership.put_shard(SHARD)
    await save_view(view, VIEW)
    return {"text": TEXT, "membership": records.content or b"", "view": view.content or b""}


def write_files() -> dict[str, bytes]:
    """Name -> bytes of the file."""
    return {name: encode(content) for name, content in asyncio.run(_contents()).items()}


def main() -> None:
    """Write the golden files anew."""
    GOLDEN.mkdir(exist_ok=True)
    for name, data in write_files().items():
        (GOLDEN / name).write_bytes(data)


if __name__ == "__main__":
    main()
