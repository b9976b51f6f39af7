"""Closing an index: nothing that was acknowledged is lost, nothing is left open, whatever failed before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import patch

import pytest

from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import StorageError
from sarp_cluster.testing.reference_index import chained_block_ids
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

SPEC = NamespaceSpec(tenant="t", model="m", hash_profile=HashProfile.OPAQUE)


async def test_what_is_acknowledged_while_the_index_closes_is_on_disk(tmp_path: Path) -> None:
    index = await Index.open(tmp_path / "log", secret=bytes(32))
    namespace = index.create_namespace(SPEC)
    await index.insert(namespace, chained_block_ids((1, 2, 3)), worker=Worker("w"))
    closing = asyncio.create_task(index.close())
    number = 0
    while not closing.done():
        number += 1
        try:
            await index.insert(namespace, chained_block_ids((number, 7, 7)), worker=Worker("w"))
        except StorageError:
            pass  # refused is fine
        await asyncio.sleep(0)
    await closing
    await asyncio.sleep(0.05)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "log").iterdir())
    assert on_disk == index.statistics().disk_bytes


async def test_an_index_whose_background_work_failed_still_closes_its_store(tmp_path: Path) -> None:
    config = IndexConfig(delta_segments_max=0)
    index = await Index.open(tmp_path / "log", config, secret=bytes(32))
    namespace = index.create_namespace(SPEC)
    with patch.object(index.background, "_fold_step", side_effect=StorageError("disk full")):
        tokens = tuple(range(60))
        await index.insert(namespace, chained_block_ids(tokens), worker=Worker("w"))
        await index.insert(namespace, chained_block_ids((*tokens, 60)), worker=Worker("w"), first=60)
        assert index.state.table.deltas
        await asyncio.sleep(0.05)
    try:
        await index.close()
    except StorageError:
        pass  # may be told, must not keep the store open
    with pytest.raises(StorageError):
        await index.insert(namespace, chained_block_ids((9,)), worker=Worker("w"))
    assert sum(f.stat().st_size for f in (tmp_path / "log").iterdir()) == index.statistics().disk_bytes
