"""docs/protocol.md says what the code does."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from sarp_cluster import limits
from sarp_cluster.wire.control import PROTOCOL_VERSION
from sarp_cluster.wire.faults import STATUS
from sarp_cluster.wire.messages import Reason
from sarp_cluster.wire.operations import OPERATIONS
from tests.golden.wire_messages import GOLDEN
from tests.wire.protocol_tables import DOCUMENT, filled, shown

TEXT = DOCUMENT.read_text()


def test_its_tables_are_those_of_the_schema() -> None:
    assert filled(TEXT) == TEXT, "python -m tests.wire.protocol_tables writes them"


def test_every_field_of_every_message_says_what_it_is() -> None:
    assert len(shown()) > 30
    assert "| `seq` | integer (≤ 9,223,372,036,854,775,807) or null | `null` | Number of this change" in TEXT


def test_its_codes_are_all_there_are_with_their_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \| (.+) \|$", TEXT, re.MULTILINE)
    assert {code: int(status) for code, status, _ in rows} == STATUS
    assert [code for code, *_ in rows] == list(STATUS)


def test_its_reasons_are_all_there_are() -> None:
    told = TEXT.split("`degraded` says why:")[1].split(".")[0]
    assert tuple(re.findall(r"`(\w+)`", told)) == get_args(Reason)


def test_its_operations_are_all_there_are() -> None:
    told = re.findall(r"^\| `(\w+)` \| (?:GET|POST) ", TEXT, re.MULTILINE)
    assert told == [one.name for one in OPERATIONS.values() if one.scope != "node"]


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("at most 255 bytes", limits.NAME_BYTES_MAX),
        ("at most 16 MiB", limits.BODY_BYTES_MAX // 2**20),
        ("batches 32 MiB", limits.BATCH_BYTES_MAX // 2**20),
        ("within 10 s", limits.HEADER_TIMEOUT_MS // 1000),
        ("75 s behind an answer", limits.IDLE_TIMEOUT_MS // 1000),
        ("body within 30 s", limits.BODY_TIMEOUT_MS // 1000),
        ("closed after 300 s", limits.STREAM_IDLE_TIMEOUT_MS // 1000),
        ("1,024 without an answer", limits.REQUESTS_A_CONNECTION_MAX),
        ("up to 256 items", limits.BATCH_ITEMS_MAX),
        ("today 1.", PROTOCOL_VERSION),
    ],
)
def test_its_limits_are_those_of_the_code(said: str, limit: int) -> None:
    assert said in " ".join(TEXT.split())
    assert limit == int(re.sub(r"[^\d]", "", said))


def test_its_example_is_a_golden_frame() -> None:
    example = TEXT.split("<!-- example -->")[1].split("<!-- /example -->")[0]
    for name, label in (("frame-least", "request"), ("frame-least-reply", "reply")):
        told = re.search(rf"^{label} +([0-9a-f ]+(?:\n +[0-9a-f ]+)*)$", example, re.MULTILINE)
        assert told is not None
        assert bytes.fromhex(told[1].replace("\n", " ")) == (GOLDEN / name).read_bytes()
