"""Frames: cut as they come, bounded, and refused by name."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, SarpError, TooLargeError
from sarp_cluster.wire import frames

NUMBERS = st.integers(0, frames.ID_MAX)
BODIES = st.dictionaries(st.text(max_size=4), st.integers(0, 2**64 - 1) | st.binary(max_size=20), max_size=3)
FRAMES = st.lists(st.tuples(NUMBERS, st.text(max_size=8), BODIES), max_size=6)


def framed(value: Any) -> bytes:
    payload: bytes = msgpack.packb(value)
    return len(payload).to_bytes(4, "little") + payload


@given(FRAMES, st.lists(st.integers(1, 9), max_size=40))
def test_frames_come_out_however_their_bytes_arrive(sent: list[tuple[int, str, Any]], pieces: list[int]) -> None:
    stream = b"".join(frames.pack(*frame) for frame in sent)
    assert stream == b"".join(framed(frame) for frame in sent)
    reader, found = frames.request_reader(), []
    while stream:
        size = pieces.pop() if pieces else len(stream)
        reader.feed(stream[:size])
        stream = stream[size:]
        found += [(number, what, msgspec.msgpack.decode(body)) for number, what, body in reader.frames()]
    assert found == sent
    assert not reader.partial


@given(FRAMES.filter(bool), st.data())
def test_what_is_cut_off_is_awaited(sent: list[tuple[int, str, Any]], data: st.DataObject) -> None:
    stream = b"".join(frames.pack(*frame) for frame in sent)
    last = len(frames.pack(*sent[-1]))
    reader = frames.request_reader()
    reader.feed(stream[: len(stream) - data.draw(st.integers(1, last - 1))])
    assert len(list(reader.frames())) == len(sent) - 1
    assert reader.partial


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_frames_or_refused_by_name(raw: bytes, requests: bool) -> None:
    reader: frames.FrameReader[Any] = frames.request_reader() if requests else frames.response_reader()
    reader.feed(raw)
    try:
        list(reader.frames())
    except SarpError as refused:
        error: SarpError | None = refused
    else:
        error = None
    if error is not None:
        assert isinstance(error, TooLargeError | BadRequestError)
        assert error.field == "frame"


@given(st.binary(max_size=30))
def test_a_payload_that_is_no_frame_is_refused(payload: bytes) -> None:
    reader = frames.request_reader()
    reader.feed(len(payload).to_bytes(4, "little") + payload)
    try:
        value: Any = msgpack.unpackb(payload, raw=True, strict_map_key=False)
    except Exception:
        value = None
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], int) and isinstance(value[1], bytes):
        return
    with pytest.raises(BadRequestError) as caught:
        list(reader.frames())
    assert caught.value.field == "frame"


@pytest.mark.parametrize(
    "value",
    [None, [], [1], [1, "a"], [1, "a", {}, 1], ["1", "a", {}], [1, 2, {}], [1, b"a", {}], {"a": 1}, "text", 7],
)
def test_a_frame_of_another_form_is_refused(value: Any) -> None:
    reader = frames.request_reader()
    reader.feed(framed(value))
    with pytest.raises(BadRequestError):
        list(reader.frames())


def test_a_length_over_the_limit_is_refused_before_its_bytes_are_awaited() -> None:
    reader = frames.request_reader()
    reader.feed((limits.BATCH_BYTES_MAX + 1).to_bytes(4, "little"))
    with pytest.raises(TooLargeError) as caught:
        list(reader.frames())
    assert caught.value.field == "frame"
    reader = frames.request_reader()
    reader.feed(limits.BATCH_BYTES_MAX.to_bytes(4, "little"))
    assert list(reader.frames()) == []


def test_what_is_packed_is_no_longer_than_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 16)
    with pytest.raises(TooLargeError):
        frames.pack(1, "match", bytes(16))


def test_a_body_nested_without_end_is_refused_or_left_to_its_reader() -> None:
    reader = frames.request_reader()
    payload = b"\x93\x01\xa1a" + b"\x91" * 100_000
    reader.feed(len(payload).to_bytes(4, "little") + payload)
    with pytest.raises(BadRequestError):
        list(reader.frames())
