"""CRC-32C for tests and tools. Compiled code cimports the C functions and calls them without Python."""

from typing_extensions import Buffer

def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C of `data`, continuing from `value`, the checksum of what came before it."""

def crc32c_software(data: Buffer, value: int = 0) -> int:
    """The same from tables, whatever the CPU offers: the path of a host without the instruction."""
