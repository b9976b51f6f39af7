"""Messages that were written once are read today, and what is written today is the same bytes: by msgspec, which the
nodes use, and by msgpack, which stands for everybody else."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest

from sarp_cluster.wire import frames
from sarp_cluster.wire.codec import JSON, decode, encode
from sarp_cluster.wire.messages import BatchReply
from sarp_cluster.wire.operations import OPERATIONS
from tests.golden.wire_messages import FRAMES, GOLDEN, MESSAGES, write_files


def plain(message: Any) -> Any:
    """The message as what any program has: maps, lists, numbers, texts, bytes."""
    if isinstance(message, BatchReply):
        return {"results": [msgpack.unpackb(one) for one in message.results]}
    found = msgspec.to_builtins(message, builtin_types=(bytes,))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def test_the_bytes_have_not_changed() -> None:
    assert {path.name: path.read_bytes() for path in GOLDEN.iterdir()} == write_files()


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_msgpack_reads_and_writes_the_same(name: str) -> None:
    raw, message = (GOLDEN / name).read_bytes(), MESSAGES[name]
    assert msgpack.unpackb(raw, strict_map_key=False) == plain(message)
    # The same message, but not always the same bytes: msgspec may give a map a longer header than it needs.
    assert plain(decode(msgpack.packb(plain(message)), type(message))) == plain(message)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_msgspec_reads_and_writes_the_same(name: str) -> None:
    raw, message = (GOLDEN / name).read_bytes(), MESSAGES[name]
    read = decode(raw, type(message))
    assert encode(read) == raw
    assert plain(read) == plain(message)


@pytest.mark.parametrize("name", sorted(set(MESSAGES) - {"batch-reply"}))
def test_json_says_the_same(name: str) -> None:
    message = MESSAGES[name]
    assert encode(decode(encode(message, JSON), type(message), JSON)) == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_a_frame_is_a_length_and_an_array(name: str) -> None:
    raw = (GOLDEN / name).read_bytes()
    number, what, body = FRAMES[name]
    assert int.from_bytes(raw[:4], "little") == len(raw) - 4
    assert msgpack.unpackb(raw[4:]) == [number, what, plain(body)]
    reader: frames.FrameReader[Any] = frames.request_reader() if isinstance(what, str) else frames.response_reader()
    reader.feed(raw)
    ((read_number, read_what, read_body),) = reader.frames()
    assert (read_number, read_what, plain(decode(read_body, type(body)))) == (number, what, plain(body))


def test_every_request_and_reply_has_a_file() -> None:
    used = {kind for operation in OPERATIONS.values() for kind in (operation.request, operation.reply)}
    assert used <= {type(message) for message in MESSAGES.values()}


def test_what_stands_at_its_default_is_left_out_of_requests() -> None:
    assert set(msgpack.unpackb((GOLDEN / "match-least").read_bytes())) == {"op", "namespace", "token_ids"}
