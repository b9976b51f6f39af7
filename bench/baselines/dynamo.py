"""NVIDIA Dynamo's standalone indexer, filled by the events that vLLM would publish."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.request import Request, urlopen

from sarp_cluster.core.block_id import local_block_hashes

START_S: Final = 30.0
MODEL: Final = "bench"
PUBLISHER: Final = Path(__file__).with_name("dynamo_publisher.py")


class DynamoIndexer:
    """Its process. A context manager: started, and filled with the sequences, inside."""

    def __init__(self, python: str, tokens: Mapping[int, Sequence[bytes]], block_tokens: int) -> None:
        self._python = python
        self._tokens = tokens
        self._block_tokens = block_tokens
        self.host = "127.0.0.1"
        self.port, self._events = _free_port(), _free_port()
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def pid(self) -> int:
        """Of the indexer."""
        return self._processes[0].pid

    def __enter__(self) -> DynamoIndexer:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        log = subprocess.DEVNULL
        command = [self._python, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "4"]
        self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
        self._wait(lambda: self._get("/health") is not None, "answer")
        register = {
            "instance_id": 1,
            "endpoint": f"tcp://127.0.0.1:{self._events}",
            "model_name": MODEL,
            "block_size": self._block_tokens,
        }
        self._post("/register", register)
        publisher = subprocess.Popen(
            [self._python, str(PUBLISHER), str(self._events), str(self._block_tokens)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=sys.stderr,
            text=True,
        )
        self._processes.append(publisher)
        assert publisher.stdin is not None  # noqa: S101  # it is a pipe
        for sequences in self._tokens.values():
            for one in sequences:
                publisher.stdin.write(one.hex() + "\n")
        publisher.stdin.flush()
        longest = max(self._tokens)
        last = self._tokens[longest][-1]
        self._wait(lambda: self._matched(last) == len(last) // 4, "have taken every event")

    def _matched(self, tokens: bytes) -> int:
        answer = self._post("/query", {"token_ids": list(memoryview(tokens).cast("I")), "model_name": MODEL})
        return max((one["longest_matched"] for one in answer.get("instances", {}).values()), default=0)

    def queries(self, blocks: int) -> Iterator[tuple[str, list[bytes]]]:
        """(path, bodies) of both ways to ask."""
        yield (
            "/query",
            [
                json.dumps({"token_ids": list(memoryview(one).cast("I")), "model_name": MODEL}).encode()
                for one in self._tokens[blocks]
            ],
        )
        yield (
            "/query_by_hash",
            [
                json.dumps(
                    {
                        "block_hashes": list(memoryview(local_block_hashes(one, self._block_tokens)).cast("q")),
                        "model_name": MODEL,
                    }
                ).encode()
                for one in self._tokens[blocks]
            ],
        )

    def close(self) -> None:
        """End it."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _wait(self, condition: object, what: str) -> None:
        ends = time.monotonic() + START_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > ends or self._processes[0].poll() is not None:
                raise RuntimeError(f"Dynamo's indexer does not {what}")
            time.sleep(0.1)

    def _get(self, path: str) -> str | None:
        try:
            with urlopen(f"http://{self.host}:{self.port}{path}", timeout=2) as answer:
                return str(answer.read())
        except OSError:
            return None

    def _post(self, path: str, body: object) -> dict[str, dict[str, dict[str, int]]]:
        request = Request(
            f"http://{self.host}:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=10) as answer:  # noqa: S310  # http, to this machine
                return dict(json.loads(answer.read()))
        except OSError as error:
            if os.environ.get("SARP_BENCH_VERBOSE"):
                print(path, error, file=sys.stderr)
            return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
