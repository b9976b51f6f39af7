"""Locations that do not fit one record are the caller's fault: refused with an error that says so, nothing changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sarp_cluster import limits
from sarp_cluster.errors import TooLargeError
from sarp_cluster.testing.core_access import load, store
from sarp_cluster.testing.segments import make_batch
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

FIRST_SLOT = 4096
BLOCKS = 64
EVERY_SECOND = 0x5555555555555555
RUNS_A_WORKER, RUN_AND_HANDLE_BYTES = 32, 20
RECORD_BYTES_MAX = 0xFFFF * 8
HOLDERS = (RECORD_BYTES_MAX - 64 - 8 * BLOCKS) // (RUNS_A_WORKER * RUN_AND_HANDLE_BYTES)
"""Workers that hold every second block, each with a handle: one more does not fit the segment's record."""


async def fill_up(index: Index) -> None:
    """Make the first segment's record nearly as large as a record may be."""
    state = index.state
    batch = load(state.table, [FIRST_SLOT])
    if state.store.read_cached(batch):
        state.store.read_wait(batch)
    (segment,) = batch.describe()
    runs = []
    for number in range(HOLDERS):
        worker = state.workers.add(f"w{number}", 0)
        runs.append({"worker": worker, "generation": 0, "tier": 0, "mask": EVERY_SECOND, "handle": number})
    full = make_batch([segment | {"runs": runs, "image_count": 0}])
    state.store.put(full)
    store(state.table, full)


def test_more_runs_than_a_record_holds_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        index = await Index.open(tmp_path, secret=bytes(32))
        try:
            namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
            ids = b"".join(number.to_bytes(8, "little") for number in range(1, BLOCKS + 1))
            await index.insert(namespace, ids, worker=Worker("w0"))
            await fill_up(index)

            async def hold_every_second_block() -> None:
                for end in range(8, len(ids), 16):
                    first = end // 8 - 1
                    await index.insert(namespace, ids[:end], worker=Worker("one more"), first=first, handle=1)

            with pytest.raises(TooLargeError):
                await hold_every_second_block()
            await index.validate()

            # A refused change changes nothing: no worker is entered, no generation bumped, nothing written.
            known, lsn = index.state.workers.count, index.store.lsn
            for worker in (Worker("w1"), Worker("never seen")):
                with pytest.raises(TooLargeError):
                    await index.insert(namespace, ids[:8], worker=worker, generation=1, handle=2)
            assert (index.state.workers.count, index.state.workers.generation(1)) == (known, 0)
            assert index.store.lsn == lsn
        finally:
            await index.close()

    asyncio.run(test())


async def test_an_answer_with_too_many_locations_is_cut_behind_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = await Index.open(tmp_path, secret=bytes(32))
    try:
        namespace = index.create_namespace(NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE))
        ids = b"".join(number.to_bytes(8, "little") for number in range(1, 101))
        for name in "abc":
            await index.insert(namespace, ids, worker=Worker(name))
        whole = await index.match(namespace, ids, detail="blocks")
        assert whole.blocks is not None
        assert (len(whole.blocks), whole.truncated) == (100, False)
        for most, blocks in ((300, 100), (299, 100), (297, 99), (200, 67), (1, 1)):
            monkeypatch.setattr(limits, "LOCATIONS_ANSWER_MAX", most)
            answer = await index.match(namespace, ids, detail="blocks")
            assert answer.blocks == whole.blocks[:blocks]
            assert (answer.matched_blocks, answer.truncated) == (100, blocks < 100)
    finally:
        await index.close()
