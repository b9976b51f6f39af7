"""Redis as an index of blocks, and how long it takes to come back from its RDB file.

Two compact ways to keep a block: a string under its 8-byte ID, or a field in one of many small hashes, which Redis
packs into one piece of memory (and of its file) as long as they are small. Both values have 16 bytes. The file is
Redis's own: written by SAVE, not compressed, since IDs do not compress.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.scale.process import resident_bytes_max

HASH_FIELDS: Final = 100
"""Fields a hash has on average; up to HASH_FIELDS_MAX stay packed."""
HASH_FIELDS_MAX: Final = 512
KINDS: Final = ("string", "hash")
VALUE: Final = bytes(range(16))
POLL_S: Final = 0.001
START_S_MAX: Final = 3_600
Words = NDArray[np.uint64]


def installed() -> bool:
    """Is there a redis-server?"""
    return shutil.which("redis-server") is not None


def _commands(kind: str, ids: Words, blocks: int) -> bytes:
    """One command a block, in Redis's protocol; all have the same length, so NumPy can write them."""
    parts: list[bytes | NDArray[Any]]
    if kind == "string":
        parts = [b"*3\r\n$3\r\nSET\r\n$8\r\n", ids]
    else:
        parts = [b"*4\r\n$4\r\nHSET\r\n$4\r\n", _bucket(ids, blocks), b"\r\n$8\r\n", ids]
    parts.append(b"\r\n$16\r\n" + VALUE + b"\r\n")
    fields = [
        (f"part{number}", f"V{len(part)}" if isinstance(part, bytes) else part.dtype.str)
        for number, part in enumerate(parts)
    ]
    commands: NDArray[Any] = np.zeros(len(ids), dtype=np.dtype(fields))
    for number, part in enumerate(parts):
        commands[f"part{number}"] = np.void(part) if isinstance(part, bytes) else part
    return commands.tobytes()


def _bucket(ids: Words, blocks: int) -> NDArray[np.uint32]:
    """Which hash a block is in: IDs are spread evenly."""
    hashes = np.uint64(max(1, blocks // HASH_FIELDS))
    return ((ids >> np.uint64(32)) * hashes >> np.uint64(32)).astype("<u4")


class Redis:
    """A Redis with one file in one directory."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._kind = kind

    @property
    def file(self) -> Path:
        return self._directory / "dump.rdb"

    def fill(self, blocks: int, some_ids: Iterator[Words]) -> None:
        """Put these blocks, and write the file."""
        with self._server() as connection:
            connection.sendall(b"CLIENT REPLY OFF\r\n")
            for ids in some_ids:
                connection.sendall(_commands(self._kind, ids, blocks))
            connection.sendall(b"CLIENT REPLY ON\r\nSAVE\r\n")
            self._expect(connection, b"+OK\r\n+OK\r\n")

    def reload(self, blocks: int, query: Words) -> dict[str, float]:
        """Start on the file, and ask for a sequence until all of it is there."""
        words = ["GET"] if self._kind == "string" else ["HGET"]
        keys = [[int(one).to_bytes(8, "little")] for one in query]
        if self._kind == "hash":
            buckets = _bucket(query, blocks)
            keys = [[int(bucket).to_bytes(4, "little"), *key] for bucket, key in zip(buckets, keys, strict=True)]
        asked = b"".join(_command(words[0].encode(), *key) for key in keys)
        answer = b"$16\r\n" + VALUE + b"\r\n"
        started = time.monotonic_ns()
        with self._server() as connection:
            opened = time.monotonic_ns()
            while True:
                connection.sendall(asked)
                first = connection.recv(1)
                if first == b"$":
                    self._expect(connection, (answer * len(query))[1:])
                    break
                self._skip_errors(connection, len(query))
                time.sleep(POLL_S)
            answered = time.monotonic_ns()
            # Not what INFO says: it looks every 100 ms, and is 0 before.
            server, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            used = resident_bytes_max(server)
        return {
            "open_s": (answered - started) / 1e9,
            "process_s": (answered - started) / 1e9,
            "query_us": 0.0,
            "resident_bytes": used,
            "listening_s": (opened - started) / 1e9,
        }

    @contextmanager
    def _server(self) -> Iterator[socket.socket]:
        # The path of a socket has at most 107 bytes, so it cannot be where the user wants the files.
        with TemporaryDirectory(prefix="sarp-redis-") as short:
            options = {
                "port": "0",
                "unixsocket": f"{short}/socket",
                "save": "",
                "dir": str(self._directory),
                "dbfilename": self.file.name,
                "rdbcompression": "no",
                "hash-max-listpack-entries": str(HASH_FIELDS_MAX),
                "appendonly": "no",
            }
            process = subprocess.Popen(
                ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))],
                stdout=subprocess.DEVNULL,
            )
            try:
                with _connected(process, options["unixsocket"]) as connection:
                    yield connection
            finally:
                process.kill()
                process.wait()

    @staticmethod
    def _expect(connection: socket.socket, wanted: bytes) -> None:
        got = b""
        while len(got) < len(wanted):
            more = connection.recv(1 << 16)
            if not more:
                break
            got += more
        if got != wanted:
            raise SystemExit(f"redis-server answered {got[:80]!r}")

    @staticmethod
    def _skip_errors(connection: socket.socket, count: int) -> None:
        """Read the rest of so many answers, each of which says that the file is being loaded."""
        got = b"-"
        while got.count(b"\r\n") < count:
            got += connection.recv(1 << 16)
        if not all(line.startswith(b"-LOADING") for line in got.split(b"\r\n")[:-1]):
            raise SystemExit(f"redis-server answered {got[:80]!r}")


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _connected(process: subprocess.Popen[bytes], path: str) -> socket.socket:
    """A connection to a server that has just been started."""
    end = time.monotonic() + START_S_MAX
    while time.monotonic() < end and process.poll() is None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            time.sleep(POLL_S)
        else:
            return connection
    raise SystemExit("redis-server did not start")
