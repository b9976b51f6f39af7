"""Signed records that were written once are read today, written the same today, and no byte of them may differ."""

from __future__ import annotations

import msgspec
import pytest

from sarp_cluster.cluster.redis_membership import _field
from sarp_cluster.cluster.registry import Entry
from sarp_cluster.cluster.signed_records import Signer
from sarp_cluster.cluster.slot_map import PackedSlotMap, SlotMap
from sarp_cluster.errors import MembershipError, RecordsRejectedError
from tests.golden.record_files import ENTRIES, SLOT_MAP
from tests.golden.signed_records import CLUSTER, EXAMPLE, FIELDS, GOLDEN, PREFIX, SECRET, example, write_records
from tests.golden.test_formats_doc import EXAMPLES

ENTRY: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)
KEY, FIELD = f"{PREFIX}entries", b"tenant\0acme"


def test_the_bytes_have_not_changed() -> None:
    assert {path.name: path.read_bytes() for path in GOLDEN.iterdir()} == write_records()


def test_the_example_of_the_document_is_what_the_code_writes() -> None:
    assert EXAMPLES["redis-entry"].hex(" ") == example().hex(" ")


def test_what_was_written_once_is_read() -> None:
    signer = Signer(SECRET, CLUSTER)
    packed = signer.open(
        f"{PREFIX}slot_map", (GOLDEN / "slot_map").read_bytes(), msgspec.msgpack.Decoder(PackedSlotMap), bytes_max=2**20
    )
    assert SlotMap.unpacked(packed) == SLOT_MAP
    for number, entry in enumerate(ENTRIES):
        assert _field(entry) == FIELDS[number]
        raw = (GOLDEN / f"entry-{number}").read_bytes()
        assert signer.open(KEY, raw, ENTRY, bytes_max=2**10, field=FIELDS[number]) == entry


@pytest.mark.parametrize(
    ("secret", "cluster", "key", "field"),
    [
        (bytes(32), CLUSTER, KEY, FIELD),
        (SECRET, "fedcba9876543210", KEY, FIELD),
        (SECRET, CLUSTER, f"{PREFIX}shards", FIELD),
        (SECRET, CLUSTER, KEY, b"tenant\0acm"),
        (SECRET, CLUSTER, KEY[:-1], KEY[-1:].encode() + FIELD),
    ],
)
def test_a_record_is_for_its_place_alone(secret: bytes, cluster: str, key: str, field: bytes) -> None:
    assert Signer(SECRET, CLUSTER).open(KEY, example(), ENTRY, bytes_max=2**10, field=FIELD) == EXAMPLE
    with pytest.raises(RecordsRejectedError):
        Signer(secret, cluster).open(key, example(), ENTRY, bytes_max=2**10, field=field)


def test_a_record_with_any_bit_turned_or_cut_off_is_rejected() -> None:
    signer, raw = Signer(SECRET, CLUSTER), example()
    for bit in range(8 * len(raw)):
        turned = bytearray(raw)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MembershipError):
            signer.open(KEY, bytes(turned), ENTRY, bytes_max=2**10, field=FIELD)
    for length in range(len(raw)):
        with pytest.raises(RecordsRejectedError):
            signer.open(KEY, raw[:length], ENTRY, bytes_max=2**10, field=FIELD)


def test_a_digest_is_that_of_the_set_however_it_came_about() -> None:
    signer = Signer(SECRET, CLUSTER)
    one, two, three = (signer.seal(KEY, entry, field) for entry, field in zip(ENTRIES, FIELDS, strict=True))
    wanted = signer.digest().changed(None, one).changed(None, two)
    assert signer.digest().changed(None, two).changed(None, three).changed(three, one).seal() == wanted.seal()
    others = [
        signer.digest(),
        signer.digest().changed(None, one),
        wanted.changed(None, three),
        wanted.changed(None, one),
        wanted.changed(two, three),
    ]
    assert len({other.seal() for other in [*others, wanted]}) == 6
