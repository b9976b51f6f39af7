"""A log file that is looked through in stretches: every record that verifies is found, once, whatever else is there."""

from __future__ import annotations

import random

import pytest

from sarp_cluster.storage.log_scan import scan
from sarp_cluster.storage.record import RecordType, frame_record

FILE = 3
PAYLOAD_MAX = 400
NOT_TOLD = {RecordType.IMAGE, RecordType.DELTA, RecordType.GROUP, RecordType.ROUTING, RecordType.FILE_HEADER}


def make_file(seed: int) -> tuple[bytes, list[tuple[int, int, int, int]]]:
    """A file of records, and of each (offset, length, type, number)."""
    rng = random.Random(seed)
    data, records = b"", []
    for lsn in range(60):
        kind = rng.choice((RecordType.IMAGE, RecordType.DELTA, RecordType.WORKER, RecordType.GROUP))
        number = rng.randrange(2**32)
        payload = number.to_bytes(4, "little") + rng.randbytes(rng.randrange(PAYLOAD_MAX))
        record = frame_record(kind, payload, lsn, FILE, len(data), 1)
        records.append((len(data), len(record), int(kind), number))
        data += record
    return data, records


def found_in(data: bytes, stretch: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], bool]:
    """Look through a file: (offset, slot) of segments, (type, number) of others, and whether it is damaged."""
    segments, others, at, damaged = [], [], 0, False
    while at < len(data):
        piece = data[at : at + stretch]
        found = scan(piece, FILE, at, at + len(piece) == len(data))
        assert found.end > at
        for i in range(0, len(found.segments), 16):
            place = int.from_bytes(found.segments[i : i + 8], "little")
            assert place >> 48 == FILE
            segments.append(((place & 0xFFFFFFFF) << 3, int.from_bytes(found.segments[i + 8 : i + 12], "little")))
        others += found.others
        at, damaged = found.end, damaged or found.damaged
    return segments, others, damaged


def expected(records: list[tuple[int, int, int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return (
        [(offset, number) for offset, _, kind, number in records if kind <= RecordType.DELTA],
        [(kind, number) for _, _, kind, number in records if kind not in NOT_TOLD],
    )


@pytest.mark.parametrize("stretch", [PAYLOAD_MAX + 48, 1_000, 4_096, 10**6])
def test_all_records_are_found_in_stretches_of_any_length(stretch: int) -> None:
    data, records = make_file(1)
    segments, others, damaged = found_in(data, stretch)
    assert (segments, others) == expected(records)
    assert not damaged


@pytest.mark.parametrize("seed", range(60))
def test_what_is_damaged_is_told_and_the_rest_is_found(seed: int) -> None:
    rng = random.Random(seed)
    data, records = make_file(seed)
    spoiled = bytearray(data)
    lost = set()
    for record in rng.sample(records, rng.randint(1, 4)):
        offset, length, _, _ = record
        at = rng.randrange(length)
        spoiled[offset + at] ^= 1 << rng.randrange(8)
        # The padding of records that are no segments is outside the checksum, and no reader looks at it.
        if at < 32 + int.from_bytes(data[offset + 4 : offset + 8], "little"):
            lost.add(record)
    for stretch in (1_000, 10**6):
        segments, others, damaged = found_in(bytes(spoiled), stretch)
        assert (segments, others) == expected([record for record in records if record not in lost])
        assert damaged == bool(lost)


def test_a_file_that_ends_within_a_record_is_damaged() -> None:
    data, records = make_file(2)
    segments, others, damaged = found_in(data[:-8], 10**6)
    assert (segments, others) == expected(records[:-1])
    assert damaged


def test_a_length_that_makes_no_sense_does_not_end_the_search() -> None:
    data, records = make_file(3)
    spoiled = bytearray(data)
    offset = records[5][0]
    spoiled[offset + 4 : offset + 8] = b"\xff\xff\xff\x7f"
    segments, others, damaged = found_in(bytes(spoiled), 1_000)
    assert (segments, others) == expected(records[:5] + records[6:])
    assert damaged
