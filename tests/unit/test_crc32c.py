"""CRC-32C: published check values, and both paths against a bit-by-bit reference."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster.storage.checksum import crc32c, crc32c_software


def reference(data: bytes, value: int = 0) -> int:
    value ^= 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize("checksum", [crc32c, crc32c_software, reference])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_check_values(checksum: Callable[[bytes], int], data: bytes, expected: int) -> None:
    assert checksum(data) == expected


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_both_paths_equal_the_reference(data: bytes, value: int) -> None:
    assert crc32c(data, value) == crc32c_software(data, value) == reference(data, value)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_checksum_continues_where_another_stopped(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


def test_both_paths_agree_at_any_address_and_length() -> None:
    data = memoryview(random.Random(3).randbytes(4096))
    for start in range(9):
        for length in (*range(70), 600, 1023, 4000):
            part = data[start : start + length]
            assert crc32c(part) == crc32c_software(part)


def test_a_value_that_is_no_u32_is_refused() -> None:
    for value in (-1, 2**32):
        with pytest.raises(OverflowError):
            crc32c(b"", value)
