"""One line of a dump as checked fields. Every error names the line and the field."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from sarp_cluster import limits
from sarp_cluster.errors import DumpError

BLOCK_ID_BYTES: Final = 8
BLOCK_IDS: Final = re.compile(r"[0-9a-f]{16}(?: [0-9a-f]{16})*", re.ASCII)
HANDLE: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)


class DumpLine:
    """An object of a line. Each field is asked for once; what nobody asked for is an error (`finish`)."""

    def __init__(self, number: int, line: bytes) -> None:
        self._number = number
        self._within = ""
        if len(line) > limits.DUMP_LINE_BYTES_MAX:
            raise DumpError(f"line {number}: longer than {limits.DUMP_LINE_BYTES_MAX} bytes (DUMP_LINE_BYTES_MAX)")
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DumpError(f"line {number}: not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise DumpError(f"line {number}: not a JSON object")
        self._fields: dict[str, object] = fields
        self.kind = self.text("type")

    @classmethod
    def _part(cls, whole: DumpLine, within: str, fields: dict[str, object]) -> DumpLine:
        part = cls.__new__(cls)
        part._number, part._within, part._fields, part.kind = whole._number, within, fields, whole.kind
        return part

    def error(self, field: str, message: str) -> DumpError:
        """What to raise about a field."""
        return DumpError(f"line {self._number}: field {self._within}{field}: {message}")

    def has(self, field: str) -> bool:
        """Is there such a field?"""
        return field in self._fields

    def is_null(self, field: str) -> bool:
        """Is the field null? Then it has been asked for."""
        if field in self._fields and self._fields[field] is None:
            del self._fields[field]
            return True
        return False

    def text(self, field: str) -> str:
        """A text."""
        value = self._take(field)
        if not isinstance(value, str):
            raise self.error(field, f"{_shown(value)} is not a text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(field, "half a character: a surrogate without its other half") from None
        return value

    def integer(self, field: str, lowest: int, highest: int) -> int:
        """A whole number in lowest..highest."""
        value = self._take(field)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise self.error(field, f"{_shown(value)} is not a whole number in {lowest}..{highest}")
        return value

    def number(self, field: str, expected: int) -> None:
        """The number that comes next."""
        value = self._take(field)
        if value != expected or isinstance(value, bool):
            raise self.error(field, f"{_shown(value)}, but numbers go up by one: this is {expected}")

    def choice(self, field: str, choices: Sequence[str]) -> str:
        """One of some words."""
        value = self.text(field)
        if value not in choices:
            raise self.error(field, f"{_shown(value)} is not one of {', '.join(choices)}")
        return value

    def block_ids(self, field: str) -> bytes:
        """Wire IDs, packed, u64 little-endian."""
        value = self.text(field)
        if not BLOCK_IDS.fullmatch(value):
            raise self.error(field, "not block IDs of 16 hexadecimal digits (0-9a-f) each, with one blank between them")
        packed = bytes.fromhex(value)
        count = len(packed) // BLOCK_ID_BYTES
        return struct.pack(f"<{count}Q", *struct.unpack(f">{count}Q", packed))

    def handle(self, field: str) -> int:
        """A handle."""
        value = self.text(field)
        if not HANDLE.fullmatch(value):
            raise self.error(field, f"{_shown(value)} is not 16 hexadecimal digits (0-9a-f)")
        return int(value, 16)

    def objects(self, field: str) -> Iterator[DumpLine]:
        """A list of objects."""
        value = self._take(field)
        if not isinstance(value, list):
            raise self.error(field, f"{_shown(value)} is not a list")
        for place, part in enumerate(value):
            if not isinstance(part, dict):
                raise self.error(f"{field}[{place}]", f"{_shown(part)} is not an object")
            yield self._part(self, f"{field}[{place}].", part)

    def finish(self) -> None:
        """Raise for a field that nobody asked for."""
        for field in self._fields:
            raise self.error(field, "unknown")

    def _take(self, field: str) -> object:
        try:
            return self._fields.pop(field)
        except KeyError:
            raise self.error(field, "missing") from None


def _shown(value: object) -> str:
    """A value for people, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
