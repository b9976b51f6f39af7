"""Frames of the stream: a length, then MessagePack (design §3).

frame    := u32 length of what follows, little-endian · array(3) [id, what, body]
request  := what is an operation's name, body its request
response := what is true for a reply, false for an ErrorReply; the id is the request's

The first frame of a connection is a `hello`. Responses come in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import msgspec

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, TooLargeError

LENGTH_BYTES: Final = 4
ID_MAX: Final = 2**32 - 1

Request = tuple[int, str, msgspec.Raw]
Response = tuple[int, bool, msgspec.Raw]
What = TypeVar("What")

_encoder: Final = msgspec.msgpack.Encoder()


def pack(number: int, what: str | bool, body: object) -> bytes:
    """One frame. `body` may be a message or the Raw of one."""
    payload = _encoder.encode((number, what, body))
    if len(payload) > limits.BATCH_BYTES_MAX:
        raise TooLargeError(
            f"frame: {len(payload)} bytes are over the limit of {limits.BATCH_BYTES_MAX}", field="frame"
        )
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class FrameReader(Generic[What]):
    """Cuts what arrives into frames. At most one frame's limit of bytes is kept."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[What]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()
        self._at = 0

    @property
    def partial(self) -> bool:
        """Has a frame begun that is not complete?"""
        return len(self._buffer) > self._at

    def feed(self, data: bytes) -> None:
        """More has arrived."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def frames(self) -> Iterator[What]:
        """The frames that are complete, each once.

        Raises TooLargeError or BadRequestError; what follows on the connection cannot be read then.
        """
        buffer = self._buffer
        while len(buffer) - self._at >= LENGTH_BYTES:
            length = int.from_bytes(buffer[self._at : self._at + LENGTH_BYTES], "little")
            if length > limits.BATCH_BYTES_MAX:
                raise TooLargeError(
                    f"frame: {length} bytes are over the limit of {limits.BATCH_BYTES_MAX}", field="frame"
                )
            begin = self._at + LENGTH_BYTES
            if len(buffer) < begin + length:
                return
            self._at = begin + length
            # A copy, which the bodies that are read out of it keep alive.
            try:
                frame = self._decoder.decode(bytes(memoryview(buffer)[begin : begin + length]))
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadRequestError(f"frame: {error}", field="frame") from None
            yield frame


_requests: Final = msgspec.msgpack.Decoder[Request](tuple[int, str, msgspec.Raw])
_responses: Final = msgspec.msgpack.Decoder[Response](tuple[int, bool, msgspec.Raw])


def request_reader() -> FrameReader[Request]:
    """Reads what a client sends."""
    return FrameReader(_requests)


def response_reader() -> FrameReader[Response]:
    """Reads what a server sends."""
    return FrameReader(_responses)
