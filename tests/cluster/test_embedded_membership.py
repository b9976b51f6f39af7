"""Embedded membership alone: a second coordinator is refused, a power cut leaves whole records, damage is told."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import Records
from sarp_cluster.cluster.registry import TenantEntry
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.errors import MembershipError, StorageError
from sarp_cluster.storage.record_file import RecordFile
from sarp_cluster.testing.crash_file_system import CrashFileSystem
from sarp_cluster.testing.crash_image import materialise
from tests.cluster.membership_backends import Embedded
from tests.cluster.test_membership import FIRST, shard
from tests.crash.virtual_time import run
from tests.golden.record_files import Memory

IMAGES = range(6)
EMPTY = Records(slot_map=None, number=0, entries=[], shards={})


async def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    backend = Embedded(tmp_path / "records")
    first = await backend.open()
    with pytest.raises(StorageError, match="another process has it"):
        await backend.open()
    await first.close()
    await (await backend.open()).close()


def test_after_a_power_cut_the_records_are_those_before_a_change_or_after_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    files = CrashFileSystem(root)
    states: list[tuple[int, Records]] = [(0, EMPTY)]

    async def work() -> None:
        membership = await EmbeddedMembership.open(await RecordFile.open(root / "records", files))
        for put in (
            membership.put_shard(shard("a")),
            membership.put_slot_map(FIRST, expected=None),
            membership.put_entries([TenantEntry(1, "t", 1)], 1),
            membership.put_slot_map(FIRST.changed(nonce=bytes(NONCE_BYTES)), expected=FIRST),
            membership.put_entries([TenantEntry(2, "t", 2)], 2),
        ):
            await put
            states.append((files.position, await membership.load()))
        await membership.close()

    async def records(path: Path) -> Records:
        membership = await Embedded(path).open()
        try:
            return await membership.load()
        finally:
            await membership.close()

    run(work)
    for crash in range(files.position + 1):
        done = [state for position, state in states if position <= crash]
        allowed = [done[-1], *(state for _, state in states[len(done) : len(done) + 1])]
        for image in IMAGES:
            disk = tmp_path / f"{crash}-{image}"
            materialise(files, crash, image, disk)
            found = run(lambda disk=disk: records(disk / "records"))  # type: ignore[misc]
            assert found in allowed, f"crash {crash}, image {image}"


async def test_what_could_not_be_written_is_not_there() -> None:
    class Full(Memory):
        full = False

        async def write(self, content: bytes) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "no space")
            await super().write(content)

    store = Full()
    membership = await EmbeddedMembership.open(store)
    await membership.put_slot_map(FIRST, expected=None)
    before = await membership.load()
    store.full = True
    for put in (
        membership.put_slot_map(FIRST.changed(nonce=bytes(NONCE_BYTES)), expected=FIRST),
        membership.put_entries([TenantEntry(1, "t", 1)], 1),
        membership.put_shard(shard("a")),
    ):
        with pytest.raises(MembershipError, match="no space"):
            await put
    assert await membership.load() == before
    store.full = False
    await membership.put_shard(shard("a"))
    assert (await membership.load()).shards == {"a": shard("a")}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"version": 1}),
        msgspec.msgpack.encode({"version": 2, "slot_map": None, "number": 0, "entries": [], "shards": {}}),
        msgspec.msgpack.encode({"version": 1, "slot_map": None, "number": 0, "entries": [], "shards": {}, "more": 1}),
        msgspec.msgpack.encode(
            {
                "version": 1,
                "slot_map": msgspec.structs.replace(SlotMap.first(["a"], bytes(16)).packed(), owners=b""),
                "number": 0,
                "entries": [],
                "shards": {},
            }
        ),
    ],
    ids=["empty", "not MessagePack", "fields missing", "newer", "unknown field", "a map without owners"],
)
async def test_records_that_make_no_sense_are_refused(content: bytes) -> None:
    with pytest.raises(MembershipError, match=r"^membership: "):
        await EmbeddedMembership.open(Memory(content))
