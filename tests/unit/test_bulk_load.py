"""Stores written in bulk are stores: verified, opened, and asked for what is in them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from bench.bulk_load import template_of, write_store
from bench.scale.process import SECRET
from bench.scale.snapshots import sorted_entries
from bench.scale.template import Template
from sarp_cluster.storage.verify import verify
from shard.index import Index

LIMIT: Final = 50


@pytest.fixture(scope="module", params=["trace", "skewed"])
def template(request: pytest.FixtureRequest) -> Template:
    return template_of(request.param, limit=LIMIT)


def test_a_store_of_replicas_is_whole_and_answers_for_each(template: Template, tmp_path: Path) -> None:
    loaded = write_store(tmp_path / "store", template, 3.5 * template.blocks)
    assert loaded.replicas == template.replicas_for(3.5 * template.blocks) > 3
    found = verify(tmp_path / "store")
    assert not found.findings
    assert (found.segments, found.blocks) == (loaded.segments, loaded.blocks)

    async def ask() -> None:
        index = await Index.open(tmp_path / "store", secret=SECRET)
        await index.drain_backfill()
        await index.validate()
        assert index.statistics().blocks == loaded.blocks
        namespace = index.create_namespace(template.spec)
        for replica in (0, 1, loaded.replicas - 1):
            for number in (0, len(template.paths) - 1):
                query = template.query(number, replica)
                assert (await index.match(namespace, query)).matched_blocks == len(query) // 8 > 0
        absent = template.query(0, loaded.replicas)
        shared = sum(part.fixed for part in template.paths[0])
        assert (await index.match(namespace, absent)).matched_blocks == shared
        await index.close()

    asyncio.run(ask())


def test_registrations_of_a_template_are_those_of_its_replicas(template: Template, tmp_path: Path) -> None:
    """What the baselines rebuild is what the index has: the same keys, filters and slots."""
    write_store(tmp_path / "store", template, 0)

    async def postings() -> set[tuple[int, int, int, int]]:
        index = await Index.open(tmp_path / "store", secret=SECRET)
        await index.drain_backfill()
        found = {one for one in index.state.directory.postings() if one[3] >= 4096}
        await index.close()
        return found

    assert asyncio.run(postings()) == {
        (int(one["key"]), int(one["high"]), int(one["low"]), int(one["slot"])) for one in template.entries
    }


def test_registrations_of_all_replicas_come_sorted(template: Template, tmp_path: Path) -> None:
    replicas = 5
    write_store(tmp_path / "store", template, template.blocks_of(replicas))

    async def postings() -> list[tuple[int, int, int, int]]:
        index = await Index.open(tmp_path / "store", secret=SECRET)
        await index.drain_backfill()
        found = [one for one in index.state.directory.postings() if one[3] >= 4096]
        await index.close()
        return found

    made = np.concatenate(list(sorted_entries(template, replicas)))
    listed = list(zip(*(made[field].tolist() for field in ("key", "high", "low", "slot")), strict=True))
    assert listed == sorted(listed)
    found = asyncio.run(postings())
    # Longer lists get finer points, which a template of fewer chats does not have: nothing is missing otherwise.
    assert set(listed) <= set(found)
    if not template.shared:
        assert set(listed) == set(found)
