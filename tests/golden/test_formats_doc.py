"""docs/formats.md shows the bytes that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sarp_cluster.storage.record import RecordType
from sarp_cluster.testing.segments import pack_place
from tests.golden.log_records import Written, write_records

DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"


def read_examples() -> dict[str, bytes]:
    """The examples by name: blocks fenced by ```hex NAME, bytes up to the semicolon of each line."""
    examples = {}
    for name, block in re.findall(r"^```hex (\S+)\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        examples[name] = bytes.fromhex("".join(line.partition(";")[0] for line in block.splitlines()))
    return examples


EXAMPLES = read_examples()


@pytest.fixture(scope="module")
def written() -> dict[str, Written]:
    return write_records()


RECORDS = {name: data for name, data in EXAMPLES.items() if name not in ("record-file", "redis-entry")}
"""Of the log; test_record_files and test_signed_records compare the others."""


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_an_example_is_what_the_code_writes(name: str, written: dict[str, Written]) -> None:
    assert EXAMPLES[name].hex(" ") == written[name].data.hex(" ")


def test_each_type_of_record_has_an_example_and_a_section(written: dict[str, Written]) -> None:
    assert {written[name].header.type for name in RECORDS} == set(RecordType)
    sections = re.findall(r"^## .*\(type (\d+)\)$", DOCUMENT.read_text(), re.MULTILINE)
    assert {int(number) for number in sections} | {RecordType.FILE_HEADER} == set(RecordType)


def test_the_example_of_a_place_is_right(written: dict[str, Written]) -> None:
    header, data = written["image"]
    place = f"{pack_place(header.file, header.offset, len(data)):016x}"
    assert f"`{place[:4]} {place[4:8]} {place[8:]}`" in DOCUMENT.read_text()


def test_links_within_the_page_lead_somewhere() -> None:
    text = DOCUMENT.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
