"""SSD-BlockHash: one RocksDB record a block (key: namespace and block ID; value: who holds it), every write synced.

No strawman: callers who come while a write runs are merged into one WriteBatch with one sync, as our log does it. A new
block is put without looking whether it is there, which an index whose blocks have several holders could not do. Nothing
is compressed: there are two cores and block IDs do not compress. Log files are used again, so that a sync need not
extend them.

Two ways to RocksDB: `rocksdict` from PyPI, and the C library where it is installed (Debian: librocksdb7.8), whose
batches are built by NumPy in one piece: Python puts block by block into the first at more than a microsecond each.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import re
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

NAMESPACE: Final = struct.pack("<I", 1)
BLOCK_ID_BYTES: Final = 8
WRITE_BUFFER_BYTES: Final = 256 << 20
LOGS_KEPT: Final = 8
BACKGROUND_JOBS: Final = 2

Insert = tuple[bytes, int]
"""Packed block IDs, and the index of the worker that holds them."""


class BlockHashStore(Protocol):
    """A RocksDB with a record a block."""

    @property
    def name(self) -> str: ...

    def write(self, inserts: Sequence[Insert]) -> None:
        """Put all blocks of these inserts by one batch, and sync it."""

    def counted(self, what: str) -> int:
        """A counter of RocksDB's write-ahead log: `synced` (syncs so far) or `bytes`."""

    def contains(self, ids: bytes, worker: int) -> bool:
        """Are all these blocks there, held by this worker?"""

    def close(self) -> None: ...


def metadata(worker: int) -> bytes:
    """What our location run says of a block: worker, generation, tier."""
    return struct.pack("<IIB", worker, 0, 0)


def keys(ids: bytes) -> list[bytes]:
    """The key of each block: its namespace and its ID."""
    return [NAMESPACE + ids[at : at + BLOCK_ID_BYTES] for at in range(0, len(ids), BLOCK_ID_BYTES)]


class RocksDictStore:
    """Through `rocksdict`."""

    name = "RocksDB (rocksdict)"

    def __init__(self, directory: Path) -> None:
        import rocksdict  # noqa: PLC0415  # in the extra `bench`

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(WRITE_BUFFER_BYTES)
        options.set_recycle_log_file_num(LOGS_KEPT)
        options.set_max_background_jobs(BACKGROUND_JOBS)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.enable_statistics()
        self._options = options
        self._new_batch = rocksdict.WriteBatch
        self._db = rocksdict.Rdict(str(directory), options=options)
        self._synced = rocksdict.WriteOptions()
        self._synced.sync = True

    def write(self, inserts: Sequence[Insert]) -> None:
        batch = self._new_batch(raw_mode=True)
        for ids, worker in inserts:
            deque(map(batch.put, keys(ids), repeat(metadata(worker))), maxlen=0)
        self._db.write(batch, self._synced)

    def counted(self, what: str) -> int:
        return _counter(self._options.get_statistics() or "", what)

    def contains(self, ids: bytes, worker: int) -> bool:
        return all(self._db.get(key) == metadata(worker) for key in keys(ids))

    def close(self) -> None:
        self._db.close()


BATCH_HEADER: Final = struct.Struct("<QI")
RECORD: Final = np.dtype(
    [("tag", "u1"), ("key_bytes", "u1"), ("namespace", "<u4"), ("id", "<u8"), ("value_bytes", "u1"), ("value", "V9")]
)
PUT_TAG: Final = 1


def c_library() -> ctypes.CDLL | None:
    """The C library of RocksDB, if it is installed."""
    name = ctypes.util.find_library("rocksdb")
    return None if name is None else ctypes.CDLL(name)


class LibRocksStore:
    """Through the C library."""

    name = "RocksDB (C library)"

    def __init__(self, directory: Path, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._error = ctypes.c_char_p()
        options = self._call("options_create", pointer)
        self._call("options_set_create_if_missing", None, options, ctypes.c_ubyte(1))
        self._call("options_set_write_buffer_size", None, options, size(WRITE_BUFFER_BYTES))
        self._call("options_set_recycle_log_file_num", None, options, size(LOGS_KEPT))
        self._call("options_set_max_background_jobs", None, options, ctypes.c_int(BACKGROUND_JOBS))
        self._call("options_set_compression", None, options, ctypes.c_int(0))
        self._call("options_enable_statistics", None, options)
        self._options = options
        self._db = self._call("open", pointer, options, str(directory).encode(), ctypes.byref(self._error))
        self._check()
        self._synced = self._call("writeoptions_create", pointer)
        self._call("writeoptions_set_sync", None, self._synced, ctypes.c_ubyte(1))
        self._reading = self._call("readoptions_create", pointer)
        self._batch_of = library.rocksdb_writebatch_create_from
        self._batch_of.restype, self._batch_of.argtypes = pointer, [ctypes.c_char_p, size]
        self._destroy = library.rocksdb_writebatch_destroy
        self._destroy.restype, self._destroy.argtypes = None, [pointer]
        self._write = library.rocksdb_write
        self._write.restype, self._write.argtypes = None, [pointer, pointer, pointer, pointer]

    def _call(self, name: str, result: Any, *arguments: object) -> Any:  # noqa: ANN401  # what C gives
        function = getattr(self._library, f"rocksdb_{name}")
        function.restype = result
        value = function(*arguments)
        return ctypes.c_void_p(value) if result is ctypes.c_void_p else value

    def _check(self) -> None:
        if self._error.value is not None:
            raise OSError(self._error.value.decode())

    def write(self, inserts: Sequence[Insert]) -> None:
        blocks = [len(ids) // BLOCK_ID_BYTES for ids, _ in inserts]
        records = np.empty(sum(blocks), dtype=RECORD)
        records["tag"], records["key_bytes"], records["namespace"], records["value_bytes"] = PUT_TAG, 12, 1, 9
        records["id"] = np.frombuffer(b"".join(ids for ids, _ in inserts), "<u8")
        values = np.array([np.void(metadata(worker)) for _, worker in inserts], dtype="V9")
        records["value"] = np.repeat(values, blocks)
        packed = BATCH_HEADER.pack(0, len(records)) + records.tobytes()
        batch = self._batch_of(packed, len(packed))
        self._write(self._db, self._synced, batch, ctypes.byref(self._error))
        self._destroy(batch)
        self._check()

    def counted(self, what: str) -> int:
        text: bytes = self._call("options_statistics_get_string", ctypes.c_char_p, self._options)
        return _counter(text.decode(), what)

    def contains(self, ids: bytes, worker: int) -> bool:
        get = self._library.rocksdb_get
        get.restype = ctypes.POINTER(ctypes.c_char)
        length = ctypes.c_size_t()
        for key in keys(ids):
            found = get(
                self._db, self._reading, key, ctypes.c_size_t(len(key)), ctypes.byref(length), ctypes.byref(self._error)
            )
            self._check()
            if not found or found[: length.value] != metadata(worker):
                return False
        return True

    def close(self) -> None:
        self._call("close", None, self._db)


def _counter(statistics: str, what: str) -> int:
    found = re.search(rf"rocksdb\.wal\.{what} COUNT : (\d+)", statistics)
    if found is None:
        raise ValueError(f"RocksDB's statistics have no rocksdb.wal.{what}")
    return int(found[1])


class GroupCommit:
    """Inserts of concurrent callers, merged: whoever comes while a batch is written goes into the next one."""

    def __init__(self, store: BlockHashStore) -> None:
        self._store = store
        self._waiting: list[Insert] = []
        self._told: asyncio.Future[None] | None = None
        self._writing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "rocksdb-writer")

    async def insert(self, ids: bytes, worker: int) -> None:
        """Durable when it returns."""
        loop = asyncio.get_running_loop()
        self._waiting.append((ids, worker))
        if self._told is not None:
            await self._told
            return
        told = self._told = loop.create_future()
        async with self._writing:
            await asyncio.sleep(0)  # callers that the last batch woke go into this one, not into the next
            inserts, self._waiting, self._told = self._waiting, [], None
            await loop.run_in_executor(self._thread, self._store.write, inserts)
        told.set_result(None)

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()
