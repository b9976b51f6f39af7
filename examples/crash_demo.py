"""Kills an index in the middle of its work and shows what is left: `python examples/crash_demo.py`.

A process inserts the sequences of a sample trace. Each insert is acknowledged once it is on the disk. In the middle
the process is killed with SIGKILL, which it can neither see nor answer. A new process opens the same store and looks up
every sequence that had been acknowledged. Exit status 1 if one is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Final

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.block_id import xxh3_block_ids
from sarp_cluster.replay.traces import open_trace
from sarp_cluster.types import NamespaceSpec, Worker
from shard.index import Index

TRACE: Final = Path(__file__).parent / "sample" / "mint_codeact.ktrc.zst"
ACKNOWLEDGED: Final = 3_000
"""The process is killed after so many."""
SHOWN: Final = 500
"""The count is printed each time it has grown by so much."""
IN_FLIGHT: Final = 32
WORKERS: Final = 8
SPEC: Final = NamespaceSpec(model="crash-demo")
CONFIG: Final = IndexConfig(retrieval_max=None)
"""No cap on reads: each match is the longest there is, so that what is missing is lost, not merely left out."""


def main() -> int:
    """Run the demonstration, or one of its two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acknowledged", type=int, default=ACKNOWLEDGED, help="kill after so many (%(default)s)")
    parser.add_argument("--process", choices=("insert", "look-up"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process == "insert":
        asyncio.run(insert(arguments.directory))
        return 0
    if arguments.process == "look-up":
        asyncio.run(look_up(arguments.directory, arguments.started))
        return 0
    with tempfile.TemporaryDirectory(prefix="sarp-crash-demo-") as directory:
        return demonstrate(Path(directory), arguments.acknowledged)


def demonstrate(directory: Path, wanted: int) -> int:
    """Insert, kill, open again, compare."""
    trace = open_trace(TRACE)
    hashed = trace.requests(lambda tokens: xxh3_block_ids(tokens, SPEC.block_size, SPEC.lora, SPEC.salt))
    sequences = [(request.session % WORKERS, request.sequence) for request in hashed if request.sequence]
    write_sequences(directory / "to-insert", sequences)

    print(f"A process inserts the sequences of {len(sequences):,} real requests, each synced to the disk.", flush=True)
    acknowledged: list[int] = []
    with subprocess.Popen(this_program("insert", directory), stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # killed in the middle of a line: nobody was told
            acknowledged.append(int(line))
            if len(acknowledged) % SHOWN == 0 and len(acknowledged) <= wanted:
                print(f"  {len(acknowledged):6,} inserts acknowledged", flush=True)
            if len(acknowledged) == wanted:
                process.kill()  # SIGKILL; what it had acknowledged before it died is still read to the end
    if len(acknowledged) < wanted:
        print(f"The process ended by itself after {len(acknowledged):,} inserts.")
        return 1
    print(f"SIGKILL. It had acknowledged {len(acknowledged):,} inserts and was in the middle of more.", flush=True)

    write_sequences(directory / "to-find", [sequences[number] for number in acknowledged])
    started = ["--started", str(time.monotonic())]
    done = subprocess.run(  # noqa: S603
        [*this_program("look-up", directory), *started], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        print("The store could not be opened again.")
        return 1
    found = json.loads(done.stdout)
    print("A new process opens the store:")
    print(f"  acknowledged inserts   {len(acknowledged):6,}")
    print(f"  found again, in full   {found['found']:6,}")
    if found["first_correct"] is not None:
        since_opening = found["first_correct"] - found["opening"]
        print(f"  first correct match    {found['first_correct']:6.3f} s after the process started,")
        print(f"                         {since_opening:6.3f} s after it began to open the store")
    missing = len(acknowledged) - found["found"]
    print(f"MISSING: {missing:,} acknowledged inserts." if missing else "Nothing acknowledged was lost.")
    return 1 if missing else 0


def this_program(process: str, directory: Path) -> list[str]:
    """The command line of one of the two processes."""
    return [sys.executable, str(Path(__file__)), "--process", process, "--directory", str(directory)]


def write_sequences(path: Path, sequences: list[tuple[int, bytes]]) -> None:
    """One sequence a line: the worker that holds it, its block IDs."""
    path.write_text("".join(f"{worker} {block_ids.hex()}\n" for worker, block_ids in sequences))


def read_sequences(path: Path) -> deque[tuple[int, Worker, bytes]]:
    """(number, worker, block IDs) of each line."""
    lines = enumerate(line.split() for line in path.read_text().splitlines())
    return deque((number, Worker(f"worker-{worker}"), bytes.fromhex(ids)) for number, (worker, ids) in lines)


async def insert(directory: Path) -> None:
    """Insert everything, many at a time, and print the number of each sequence once it is acknowledged."""
    waiting = read_sequences(directory / "to-insert")
    index = await Index.open(directory / "store", CONFIG)
    namespace = index.create_namespace(SPEC)

    async def go_on() -> None:
        while waiting:
            number, worker, block_ids = waiting.popleft()
            result = await index.insert(namespace, block_ids, worker=worker)
            if result.durable:
                print(number, flush=True)

    await asyncio.gather(*(go_on() for _ in range(IN_FLIGHT)))
    await index.close()


async def look_up(directory: Path, started: float) -> None:
    """Open the store and look everything up. Times are in seconds since `started`."""
    to_find = read_sequences(directory / "to-find")
    opening = time.monotonic() - started
    index = await Index.open(directory / "store", CONFIG)
    namespace = index.create_namespace(SPEC)
    found, first_correct = 0, None
    for _, worker, block_ids in to_find:
        answer = await index.match(namespace, block_ids, workers=[worker])
        if answer.matched_blocks == len(block_ids) // 8:
            found += 1
            first_correct = first_correct or time.monotonic() - started
    await index.close()
    print(json.dumps({"found": found, "opening": opening, "first_correct": first_correct}))


if __name__ == "__main__":
    sys.exit(main())
