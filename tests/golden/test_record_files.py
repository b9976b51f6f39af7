"""Record files that were written once are read today, and what is written today is the same bytes."""

from __future__ import annotations

import pytest

from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.view_file import load_view
from sarp_cluster.storage.record_file import decode
from tests.golden.record_files import ENTRIES, GOLDEN, NUMBER, SHARD, SLOT_MAP, TEXT, VIEW, Memory, write_files
from tests.golden.test_formats_doc import DOCUMENT, EXAMPLES


@pytest.fixture(scope="module")
def written() -> dict[str, bytes]:
    return write_files()


def golden(name: str) -> bytes:
    return decode((GOLDEN / name).read_bytes(), GOLDEN / name)


def test_the_bytes_have_not_changed(written: dict[str, bytes]) -> None:
    assert {path.name: path.read_bytes() for path in GOLDEN.iterdir()} == written


def test_the_example_of_the_document_is_what_the_code_writes(written: dict[str, bytes]) -> None:
    assert EXAMPLES["record-file"].hex(" ") == written["text"].hex(" ")
    assert "SARPREC1" in DOCUMENT.read_text()


async def test_what_was_written_once_is_read() -> None:
    assert golden("text") == TEXT
    records = await (await EmbeddedMembership.open(Memory(golden("membership")))).load()
    assert records.slot_map == SLOT_MAP
    assert (records.entries, records.number) == (ENTRIES, NUMBER)
    assert records.shards == {SHARD.shard: SHARD}
    assert await load_view(Memory(golden("view"))) == VIEW
