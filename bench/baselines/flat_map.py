"""Loads the C++ flat map; compiles it for this CPU at first use, into the build directory."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from bench.baselines import Match
from bench.baselines.compiler import compiled

_SOURCE = Path(__file__).with_name("flat_map.cpp")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled(_SOURCE, "-fno-strict-aliasing", "-shared", "-fPIC")))
    handle, size = ctypes.c_void_p, ctypes.c_uint64
    for name, result, arguments in (
        ("new", handle, []),
        ("delete", None, [handle]),
        ("insert", None, [handle, ctypes.c_char_p, size, size, ctypes.c_uint32]),
        ("match", size, [handle, ctypes.c_char_p, size, handle, size, handle]),
        ("size", size, [handle]),
        ("bytes", size, [handle]),
    ):
        function = getattr(library, f"flat_map_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class FlatMapIndex:
    """Block ID -> holders, in C++."""

    name = "C++ flat map"

    def __init__(self, workers_max: int = 4096) -> None:
        """`workers_max`: workers are 0..workers_max - 1; the buffer for answers has a place for each."""
        library = _library()
        self._delete = library.flat_map_delete
        self._match = library.flat_map_match
        self._insert = library.flat_map_insert
        self._size = library.flat_map_size
        self._bytes = library.flat_map_bytes
        self._workers_max = workers_max
        self._answer = (ctypes.c_uint32 * (2 * workers_max))()
        self._count = ctypes.c_uint64()
        self._answer_address = ctypes.addressof(self._answer)
        self._count_address = ctypes.addressof(self._count)
        self._handle = library.flat_map_new()
        if not self._handle:
            raise MemoryError

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._delete(handle)

    def __len__(self) -> int:
        return int(self._size(self._handle))

    @property
    def resident_bytes(self) -> int:
        return int(self._bytes(self._handle))

    def match(self, ids: bytes) -> Match:
        matched = self._match(
            self._handle, ids, len(ids) // 8, self._answer_address, self._workers_max, self._count_address
        )
        flat = self._answer[: 2 * self._count.value]
        return Match(matched, list(zip(flat[::2], flat[1::2], strict=True)))

    def insert(self, ids: bytes, worker: int, first: int) -> None:
        if not 0 <= worker < self._workers_max:
            raise ValueError(f"worker {worker} is not in 0..{self._workers_max - 1}")
        end = len(ids) // 8
        if first < end:
            self._insert(self._handle, ids, first, end, worker)
