"""Bytes to messages and back, in MessagePack or JSON; what does not fit the schema is refused by field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from sarp_cluster.errors import BadRequestError

T = TypeVar("T")

MSGPACK: Final = "application/msgpack"
JSON: Final = "application/json"

_msgpack_encoder: Final = msgspec.msgpack.Encoder()
_json_encoder: Final = msgspec.json.Encoder()
_msgpack_decoders: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}
_json_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}

_PATH: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED: Final = re.compile(r"field `([^`]+)`")


def encode(message: object, media: str = MSGPACK) -> bytes:
    """A message as bytes."""
    return (_json_encoder if media == JSON else _msgpack_encoder).encode(message)


def decode(raw: bytes | memoryview | msgspec.Raw, kind: type[T], media: str = MSGPACK) -> T:
    """The message of a type that `raw` is. Raises BadRequestError, naming the field where there is one."""
    try:
        if media == JSON:
            decoder = _json_decoders.get(kind)
            if decoder is None:
                decoder = _json_decoders[kind] = msgspec.json.Decoder(kind)
            return decoder.decode(raw)  # type: ignore[no-any-return]
        unpacker = _msgpack_decoders.get(kind)
        if unpacker is None:
            unpacker = _msgpack_decoders[kind] = msgspec.msgpack.Decoder(kind)
        return unpacker.decode(raw)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequestError(f"body: not {media}: {error}", field="body") from None


def convert(fields: Mapping[str, str], kind: type[T]) -> T:
    """The message of a type whose fields are these texts. Raises BadRequestError, as `decode`."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def _refusal(message: str) -> BadRequestError:
    """msgspec says what was expected and where: `Expected ... - at `$.items[3].tier``."""
    field = None
    path = _PATH.search(message)
    if path is not None:
        field = path[1]
        message = message[: path.start()]
    named = _NAMED.search(message)
    if named is not None:
        field = f"{field}.{named[1]}" if field else named[1]
    return BadRequestError(f"{field}: {message}" if field else f"body: {message}", field=field or "body")
