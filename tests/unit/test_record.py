"""Records of segments: what goes in comes out, and what does not verify is damaged, whatever its bytes are."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.storage.record import RecordType, frame_record, read_frame
from sarp_cluster.testing.segments import (
    decode_segment,
    encode_segment,
    make_batch,
    make_unread_batch,
    pack_place,
    unpack_place,
)

TO_READ, READ, DAMAGED = 0, 1, 2
IMAGE, DELTA = 1, 2
FRAME_BYTES = 32
RUN_BYTES = 12
FILE, INCARNATION, LSN = 7, 3, 1000
IMAGE_OFFSET, DELTA_OFFSET = 4096, 8192
# Offsets of fields in the payload of an image and of a delta (docs/formats.md).
IMAGE_FIELDS = {
    "slot": ("<I", 0), "tag": ("<H", 4), "window": ("<H", 6), "namespace": ("<I", 8), "parent": ("<I", 12),
    "origin": ("<I", 16), "fork": ("<B", 24), "count": ("<B", 25), "runs": ("<H", 26), "handles": ("<H", 28),
}  # fmt: skip
DELTA_FIELDS = {
    "slot": ("<I", 0), "tag": ("<H", 4), "window": ("<H", 6), "namespace": ("<I", 8), "image_count": ("<B", 12),
    "count": ("<B", 13), "runs": ("<H", 14), "handles": ("<H", 16),
}  # fmt: skip

Segment = dict[str, Any]
Record = tuple[bytes, int, int]
"""Bytes of a record, and the file and offset where it stands."""


# --- arbitrary segments -----------------------------------------------------------------------------------------------


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """A segment as insertion leaves it: runs sorted by worker and tier, a block in one run of a worker and tier."""
    u16, u32, u64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
    count = draw(st.integers(1, 64))
    holders = draw(st.lists(st.tuples(u32, st.integers(0, 3)), unique=True, max_size=6))
    runs = []
    for worker, tier in sorted(holders):
        free = 2**count - 1
        generation = draw(u32)
        for handle in draw(st.lists(st.none() | u64, unique=True, min_size=1, max_size=3)):
            mask = draw(st.integers(0, 2**count - 1)) & free
            if mask:
                runs.append({"worker": worker, "tier": tier, "generation": generation, "mask": mask, "handle": handle})
                free &= ~mask
    origin = draw(st.integers(0, 2**32 - 1))
    return {
        "slot": draw(st.integers(256, 2**31)),
        "tag": draw(u16),
        "window": draw(u16),
        "namespace": draw(u32),
        "parent": draw(u32),
        "parent_tag": draw(u16),
        "origin": origin,
        "origin_tag": draw(u16),
        "fork": draw(st.integers(1, 63)) if origin else 0,
        "ids": draw(st.lists(u64, min_size=count, max_size=count)),
        "image_count": draw(st.integers(1, count)),
        "runs": runs,
    }


def records(segment: Segment) -> tuple[Record, Record]:
    """The image of the segment's first `image_count` blocks without runs, and the delta that completes it."""
    before = segment | {"ids": segment["ids"][: segment["image_count"]], "runs": [], "image_count": 0}
    image = encode_segment(make_batch([before]), 0, LSN, FILE, IMAGE_OFFSET, INCARNATION)
    delta = encode_segment(make_batch([segment | {"write": DELTA}]), 0, LSN + 1, FILE, DELTA_OFFSET, INCARNATION)
    return (image, FILE, IMAGE_OFFSET), (delta, FILE, DELTA_OFFSET)


def whole_image(segment: Segment) -> Record:
    batch = make_batch([segment | {"write": IMAGE, "image_count": 0}])
    return encode_segment(batch, 0, LSN, FILE, IMAGE_OFFSET, INCARNATION), FILE, IMAGE_OFFSET


def decoded(segment: Segment, image: Record, delta: Record | None = None) -> Segment:
    batch = make_unread_batch([segment])
    state = decode_segment(batch, 0, image, delta)
    (item,) = batch.describe()
    assert item["state"] == state
    return item


def assert_equal(item: Segment, segment: Segment) -> None:
    assert item["state"] == READ
    for field in ("slot", "tag", "window", "namespace", "parent", "origin", "fork", "ids", "runs"):
        assert item[field] == segment[field], field


def sealed(record: Record, payload: bytes) -> Record:
    """Another payload in the record's frame, with a checksum that is right."""
    data, file, offset = record
    header = read_frame(data, 0, file, offset)
    assert header is not None
    return frame_record(header.type, payload, header.lsn, file, offset, header.incarnation), file, offset


def payload_of(record: Record) -> bytearray:
    return bytearray(record[0][FRAME_BYTES:])


def patched(record: Record, field: tuple[str, int], value: int) -> Record:
    payload = payload_of(record)
    struct.pack_into(field[0], payload, field[1], value)
    return sealed(record, bytes(payload))


EXAMPLE: Segment = {
    "slot": 300,
    "tag": 4,
    "window": 2,
    "namespace": 9,
    "parent": 299,
    "parent_tag": 1,
    "origin": 298,
    "origin_tag": 2,
    "fork": 1,
    "ids": [0xA0A0A0A0A0A0A0A0 + i for i in range(5)],
    "image_count": 3,
    "runs": [
        {"worker": 1, "tier": 0, "generation": 2, "mask": 0b10110, "handle": 77},
        {"worker": 6, "tier": 3, "generation": 0, "mask": 0b01000, "handle": None},
    ],
}


# --- round trips ------------------------------------------------------------------------------------------------------


@given(segments())
def test_an_image_reads_back(segment: Segment) -> None:
    image = whole_image(segment)
    assert len(image[0]) % 8 == 0
    item = decoded(segment, image)
    assert_equal(item, segment)
    assert item["image_count"] == len(segment["ids"])


@given(segments())
def test_an_image_and_its_delta_read_back(segment: Segment) -> None:
    image, delta = records(segment)
    assert len(delta[0]) % 8 == 0
    item = decoded(segment, image, delta)
    assert_equal(item, segment)
    assert item["image_count"] == segment["image_count"]


def test_the_most_runs_of_a_record_read_back() -> None:
    alternate = 0x5555555555555555
    segment = EXAMPLE | {
        "ids": list(range(64)),
        "runs": [{"worker": w, "tier": 1, "generation": 0, "mask": alternate, "handle": w} for w in range(800)],
    }
    image = whole_image(segment)
    assert len(image[0]) == FRAME_BYTES + 32 + 64 * 8 + 800 * 32 * (8 + RUN_BYTES)
    assert_equal(decoded(segment, image), segment)


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_a_place_packs_into_64_bits(file: int, offset: int, length: int) -> None:
    place = pack_place(file, 8 * offset, 8 * length)
    assert place == file << 48 | length << 32 | offset
    assert unpack_place(place) == (file, 8 * offset, 8 * length)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_damage() -> None:
    image, delta = records(EXAMPLE)
    for broken, is_delta in ((image, False), (delta, True)):
        for at in range(len(broken[0])):
            for bit in range(8):
                data = bytearray(broken[0])
                data[at] ^= 1 << bit
                flipped = (bytes(data), *broken[1:])
                item = decoded(EXAMPLE, image, flipped) if is_delta else decoded(EXAMPLE, flipped, delta)
                assert item["state"] == DAMAGED, (is_delta, at, bit)
                assert item["ids"] == item["runs"] == []


@given(segments(), st.data())
def test_a_changed_byte_is_damage(segment: Segment, data: st.DataObject) -> None:
    image = whole_image(segment)
    at = data.draw(st.integers(0, len(image[0]) - 1))
    changed = bytearray(image[0])
    changed[at] ^= data.draw(st.integers(1, 255))
    assert decoded(segment, (bytes(changed), *image[1:]))["state"] == DAMAGED


def test_a_record_cut_short_is_damage() -> None:
    image, delta = records(EXAMPLE)
    for length in range(len(image[0])):
        assert decoded(EXAMPLE, (image[0][:length], *image[1:]), delta)["state"] == DAMAGED
    for length in range(len(delta[0])):
        assert decoded(EXAMPLE, image, (delta[0][:length], *delta[1:]))["state"] == DAMAGED


def test_a_record_at_another_place_is_damage() -> None:
    image, delta = records(EXAMPLE)
    for file, offset in ((FILE + 1, IMAGE_OFFSET), (FILE - 1, IMAGE_OFFSET), (FILE, 0), (FILE, IMAGE_OFFSET + 8)):
        assert decoded(EXAMPLE, (image[0], file, offset), delta)["state"] == DAMAGED
    assert decoded(EXAMPLE, image, (delta[0], FILE, DELTA_OFFSET - 8))["state"] == DAMAGED


def test_other_bytes_behind_a_record_do_not_matter() -> None:
    image, delta = records(EXAMPLE)
    item = decoded(EXAMPLE, (image[0] + b"\xff" * 8, *image[1:]), (delta[0] + bytes(8), *delta[1:]))
    assert_equal(item, EXAMPLE)


# --- records that disagree --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["slot", "tag", "window", "namespace", "parent", "origin", "fork"])
def test_an_image_of_another_segment_is_damage(field: str) -> None:
    other = EXAMPLE | {field: EXAMPLE[field] + 1}
    image, delta = records(EXAMPLE)
    assert decoded(other, image, delta)["state"] == DAMAGED
    assert decoded(other, whole_image(EXAMPLE))["state"] == DAMAGED


@pytest.mark.parametrize("field", ["slot", "tag", "window", "namespace"])
def test_a_delta_of_another_segment_is_damage(field: str) -> None:
    _, delta = records(EXAMPLE | {field: EXAMPLE[field] + 1})
    image, _ = records(EXAMPLE)
    assert decoded(EXAMPLE, image, delta)["state"] == DAMAGED


def test_a_delta_of_another_image_is_damage() -> None:
    image, _ = records(EXAMPLE)
    for count in (2, 4, 5):
        _, delta = records(EXAMPLE | {"image_count": count})
        assert decoded(EXAMPLE, image, delta)["state"] == DAMAGED


def test_another_count_than_the_tables_is_damage() -> None:
    image, delta = records(EXAMPLE)
    for ids in (EXAMPLE["ids"][:4], [*EXAMPLE["ids"], 1]):
        other = EXAMPLE | {"ids": ids}
        assert decoded(other, image, delta)["state"] == DAMAGED
        assert decoded(other, whole_image(EXAMPLE))["state"] == DAMAGED
    assert decoded(EXAMPLE, image)["state"] == DAMAGED  # the image alone is not all of it


def test_an_image_is_no_delta_and_a_delta_no_image() -> None:
    image, delta = records(EXAMPLE)
    assert decoded(EXAMPLE, delta)["state"] == DAMAGED
    assert decoded(EXAMPLE, image, image)["state"] == DAMAGED
    mark = frame_record(RecordType.WORKER_MARK, bytes(200), 1, FILE, IMAGE_OFFSET, 1)
    assert decoded(EXAMPLE, (mark, FILE, IMAGE_OFFSET))["state"] == DAMAGED


# --- payloads that lie under a checksum that is right: only bounds checks stand between them and memory ---------------


@pytest.mark.parametrize("field", ["count", "runs", "handles"])
def test_an_image_with_another_count_of_anything_is_damage(field: str) -> None:
    image = whole_image(EXAMPLE)
    form, at = IMAGE_FIELDS[field]
    (true,) = struct.unpack_from(form, image[0], FRAME_BYTES + at)
    for value in range(2**8) if form == "<B" else (*range(20), 255, 256, 5461, 2**15, 2**16 - 2, 2**16 - 1):
        if value != true:
            assert decoded(EXAMPLE, patched(image, (form, at), value))["state"] == DAMAGED, value


@pytest.mark.parametrize("field", ["image_count", "count", "runs", "handles"])
def test_a_delta_with_another_count_of_anything_is_damage(field: str) -> None:
    image, delta = records(EXAMPLE)
    form, at = DELTA_FIELDS[field]
    (true,) = struct.unpack_from(form, delta[0], FRAME_BYTES + at)
    for value in range(2**8) if form == "<B" else (*range(20), 255, 256, 5461, 2**15, 2**16 - 2, 2**16 - 1):
        if value != true:
            assert decoded(EXAMPLE, image, patched(delta, (form, at), value))["state"] == DAMAGED, value


def test_a_count_over_a_segments_blocks_is_damage_even_where_the_record_is_long_enough() -> None:
    segment = EXAMPLE | {"ids": list(range(64)), "runs": []}
    for count in (65, 127, 128, 255):
        payload = payload_of(whole_image(segment)) + bytes(8 * (count - 64))
        payload[IMAGE_FIELDS["count"][1]] = count
        assert decoded(segment, sealed(whole_image(segment), bytes(payload)))["state"] == DAMAGED
    image, delta = records(segment | {"image_count": 60})
    for count in (65, 128, 255):
        payload = payload_of(delta) + bytes(8 * (count - 64))
        payload[DELTA_FIELDS["count"][1]] = count
        assert decoded(segment, image, sealed(delta, bytes(payload)))["state"] == DAMAGED


def test_a_short_or_long_payload_is_damage() -> None:
    image = whole_image(EXAMPLE)
    payload = bytes(payload_of(image))
    for length in range(len(payload)):
        assert decoded(EXAMPLE, sealed(image, payload[:length]))["state"] == DAMAGED
    for extra in range(1, 40):
        assert decoded(EXAMPLE, sealed(image, payload + bytes(extra)))["state"] == DAMAGED


def test_a_count_over_a_segments_blocks_is_not_copied_over_its_neighbours() -> None:
    segment = EXAMPLE | {"ids": list(range(64)), "runs": []}
    payload = payload_of(whole_image(segment)) + bytes(8 * (255 - 64))
    payload[IMAGE_FIELDS["count"][1]] = 255
    image, delta = records(segment | {"image_count": 60})
    more = payload_of(delta) + bytes(8 * (255 - 64))
    more[DELTA_FIELDS["count"][1]] = 255
    batch = make_unread_batch([segment] * 3)
    assert [decode_segment(batch, item, image, delta) for item in range(3)] == [READ] * 3
    assert decode_segment(batch, 0, sealed(whole_image(segment), bytes(payload))) == DAMAGED
    assert decode_segment(batch, 0, image, sealed(delta, bytes(more))) == DAMAGED
    for item in batch.describe()[1:]:
        assert_equal(item, segment)


def test_a_handle_too_many_or_too_few_is_damage() -> None:
    image = whole_image(EXAMPLE)
    (handles,) = struct.unpack_from("<H", image[0], FRAME_BYTES + IMAGE_FIELDS["handles"][1])
    column = 32 + 8 * len(EXAMPLE["ids"])
    payload = payload_of(patched(image, IMAGE_FIELDS["handles"], handles + 1))
    payload[column:column] = bytes(8)
    assert decoded(EXAMPLE, sealed(image, bytes(payload)))["state"] == DAMAGED
    payload = payload_of(patched(image, IMAGE_FIELDS["handles"], handles - 1))
    del payload[column : column + 8]
    assert decoded(EXAMPLE, sealed(image, bytes(payload)))["state"] == DAMAGED


def test_runs_that_make_no_sense_are_damage() -> None:
    image = whole_image(EXAMPLE | {"runs": EXAMPLE["runs"][1:]})
    start = len(image[0]) - FRAME_BYTES - 16  # one run, padded
    assert decoded(EXAMPLE, image)["state"] == READ

    def with_run(tier: int, first: int, count: int) -> int:
        payload = payload_of(image)
        struct.pack_into("<BBB", payload, start + 8, tier, first, count)
        state = decoded(EXAMPLE, sealed(image, bytes(payload)))["state"]
        assert isinstance(state, int)
        return state

    for first in range(256):
        for count in range(256):
            expected = READ if count and first + count <= len(EXAMPLE["ids"]) else DAMAGED
            assert with_run(3, first, count) == expected, (first, count)
    for tier in range(4, 256):  # with the top bit a run has a handle; there is none
        assert with_run(tier, 0, 1) == DAMAGED


def test_no_payload_crashes_a_reader() -> None:
    rng = random.Random(5)
    image, delta = records(EXAMPLE)
    for _ in range(20_000):
        broken = rng.choice((image, delta))
        payload = payload_of(broken)
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.choice((0, 1, 63, 64, 65, 127, 128, 255, rng.randrange(256)))
        changed = sealed(broken, bytes(payload[: rng.randint(0, len(payload))] if rng.random() < 0.2 else payload))
        item = decoded(EXAMPLE, changed, delta) if broken is image else decoded(EXAMPLE, image, changed)
        assert item["state"] in (READ, DAMAGED)
        if item["state"] == READ:
            assert all(0 < run["mask"] < 2 ** item["count"] and run["tier"] < 4 for run in item["runs"])


def test_a_damaged_segment_leaves_its_neighbours_alone() -> None:
    image, delta = records(EXAMPLE)
    batch: SegmentBatch = make_unread_batch([EXAMPLE, EXAMPLE, EXAMPLE])
    assert decode_segment(batch, 0, image, delta) == READ
    assert decode_segment(batch, 1, patched(image, IMAGE_FIELDS["runs"], 9), delta) == DAMAGED
    assert decode_segment(batch, 2, whole_image(EXAMPLE)) == READ
    first, second, third = batch.describe()
    assert_equal(first, EXAMPLE)
    assert second["runs"] == []
    assert_equal(third, EXAMPLE)


# --- frames of other records ------------------------------------------------------------------------------------------


@given(
    st.integers(0, 255),
    st.binary(max_size=100),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_frame_reads_back(kind: int, payload: bytes, lsn: int, file: int, units: int) -> None:
    data = frame_record(kind, payload, lsn, file, 8 * units, 5)
    assert len(data) == (FRAME_BYTES + len(payload) + 7) // 8 * 8
    assert data[FRAME_BYTES:].rstrip(b"\0") == payload.rstrip(b"\0")
    assert read_frame(data, 0, file, 8 * units) == (kind, len(payload), lsn, file, 8 * units, 5)
    assert read_frame(b"12345" + data, 5, file, 8 * units) is not None


def test_a_frame_outside_the_data_is_none() -> None:
    data = frame_record(RecordType.WORKER, b"0123456789", 1, 1, 0, 1)
    for at in (-1, -8, -len(data), -(2**62), len(data), len(data) + 1, 2**62, len(data) - 31):
        assert read_frame(data, at, 1, 0) is None
    for end in range(FRAME_BYTES + 10):
        assert read_frame(data[:end], 0, 1, 0) is None
    assert read_frame(b"", 0, 1, 0) is None
    assert read_frame(data, 0, 1, 4) is None  # records begin at multiples of 8


@pytest.mark.parametrize("at", [*range(FRAME_BYTES + 10)])
def test_a_flipped_byte_of_a_frame_is_none(at: int) -> None:
    data = bytearray(frame_record(RecordType.WORKER, b"0123456789", 1, 1, 0, 1))
    data[at] ^= 0x40
    assert read_frame(data, 0, 1, 0) is None
