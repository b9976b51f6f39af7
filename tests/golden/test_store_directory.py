"""A store that was written once opens today and answers as it did."""

from __future__ import annotations

import shutil
from pathlib import Path

from sarp_cluster.storage.store_directory import LOG_NAME
from sarp_cluster.testing.reference_index import Answer, chained_block_ids
from shard.index import Index
from tests.golden.store_directory import CONFIG, GOLDEN_STORE, SECRET, SEQUENCES, SPECS, WORKERS, reference


async def test_a_store_of_version_1_opens_and_answers(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN_STORE, tmp_path / "store")
    index = await Index.open(tmp_path / "store", CONFIG, secret=SECRET)
    try:
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
    assert len(names) > 1
    assert all(LOG_NAME.fullmatch(name) for name in names)
