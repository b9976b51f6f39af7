"""A store that was written once opens today and answers as it did."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sarp_cluster.storage.store_directory import LOG_NAME, MANIFEST_NAME, RUN_NAME
from sarp_cluster.testing.reference_index import Answer, chained_block_ids
from shard.index import Index
from tests.golden.store_directory import CONFIG, GOLDEN_STORE, OLDER, SECRET, SEQUENCES, SPECS, WORKERS, reference


@pytest.mark.parametrize("golden", [GOLDEN_STORE, *OLDER], ids=lambda golden: golden.name)
@pytest.mark.parametrize("snapshot", [True, False])
async def test_a_store_of_any_version_opens_and_answers(tmp_path: Path, golden: Path, snapshot: bool) -> None:
    """From its snapshot, if it has one, and from the log alone."""
    shutil.copytree(golden, tmp_path / "store")
    if not snapshot:
        for path in (tmp_path / "store").glob("manifest-*"):
            path.unlink()
    index = await Index.open(tmp_path / "store", CONFIG, secret=SECRET)
    try:
        assert (index.snapshots.newest is not None) == (snapshot and golden.name != "store-v1")
        await index.validate()
        wanted = reference()
        assert index.statistics().blocks == wanted.block_count()
        namespaces = [index.create_namespace(spec) for spec in SPECS]
        reference_namespaces = [wanted.create_namespace(spec) for spec in SPECS]
        for number, tokens in SEQUENCES:
            block_ids = chained_block_ids(tokens)
            answer = Answer.of(await index.match(namespaces[number], block_ids, detail="blocks"))
            assert answer == wanted.match(reference_namespaces[number], block_ids, detail="blocks")
            assert answer.verified_blocks == len(tokens)
        for worker in WORKERS:
            place = index.state.workers.find(*worker)
            assert place is not None
            assert index.state.workers.generation(place) == wanted.generation(worker)
    finally:
        await index.close()


def test_the_store_has_several_files_and_nothing_else() -> None:
    names = sorted(path.name for path in GOLDEN_STORE.iterdir())
    for pattern, least in ((LOG_NAME, 2), (RUN_NAME, 1), (MANIFEST_NAME, 1)):
        found = [name for name in names if pattern.fullmatch(name)]
        assert len(found) >= least
        names = [name for name in names if name not in found]
    assert not names
