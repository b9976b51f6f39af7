"""How long until a killed store answers again: from opening it to the first correct match.

    python -m bench.recovery                      stores of 1e6 and 1e7 blocks
    python -m bench.recovery --blocks 1e6 1e7 3e7

A child process makes a store of chats that share system prompts, syncs it and is killed; another one opens it and
matches. Once with the store's files in the page cache, once with them dropped from it. There are no snapshots yet: the
table and the directory are rebuilt from the log, so the time grows with the store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index

SPEC = NamespaceSpec(model="recovery", hash_profile=HashProfile.OPAQUE)
PROMPTS = 200
PROMPT_BLOCKS = 48
CHAT_BLOCKS = 150


def chat(rng: random.Random, prompts: list[bytes], number: int) -> bytes:
    """The block IDs of one conversation."""
    return prompts[number % PROMPTS] + rng.randbytes(8 * (CHAT_BLOCKS - PROMPT_BLOCKS))


async def make(directory: Path, blocks: int) -> None:
    """Fill a store, sync it, and be killed."""
    rng = random.Random(1)
    prompts = [rng.randbytes(8 * PROMPT_BLOCKS) for _ in range(PROMPTS)]
    index = await Index.open(directory)
    namespace = index.create_namespace(SPEC)
    for number in range(blocks // (CHAT_BLOCKS - PROMPT_BLOCKS)):
        await index.insert(namespace, chat(rng, prompts, number), worker=Worker(f"worker-{number % 8}"), durable=False)
        if number % 64 == 0:
            await asyncio.sleep(0)
    await index.store.sync()
    os.kill(os.getpid(), signal.SIGKILL)


async def reopen(directory: Path, started: float) -> None:
    """Open the store, match, and print what was measured as JSON."""
    rng = random.Random(1)
    prompts = [rng.randbytes(8 * PROMPT_BLOCKS) for _ in range(PROMPTS)]
    query = chat(rng, prompts, 0)
    opening = time.time()
    index = await Index.open(directory)
    found = await index.match(index.create_namespace(SPEC), query)
    matched = time.time()
    if found.matched_blocks != CHAT_BLOCKS:
        raise SystemExit(f"{found.matched_blocks} of {CHAT_BLOCKS} blocks were found again")
    statistics = index.statistics()
    await index.close()
    print(
        json.dumps(
            {
                "blocks": statistics.blocks,
                "segments": statistics.segments,
                "disk_bytes": statistics.disk_bytes,
                "open_s": matched - opening,
                "process_s": matched - started,
            }
        )
    )


def drop_page_cache(directory: Path) -> None:
    """Let the kernel forget a store's files."""
    for path in directory.glob("log-*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a step in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "bench.recovery", *arguments], capture_output=True, text=True, check=False
    )


def main() -> None:
    """Print the table, or run one step of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=float, nargs="*", default=[1e6, 1e7])
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reopen", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        asyncio.run(make(Path(options.make[0]), int(float(options.make[1]))))
    if options.reopen:
        asyncio.run(reopen(Path(options.reopen[0]), float(options.reopen[1])))
        return
    print("| blocks | segments | disk MB | page cache | open to first match, s | process start to first match, s |")
    print("|---" * 6 + "|")
    for blocks in options.blocks:
        with TemporaryDirectory() as parent:
            store = Path(parent) / "store"
            made = child("--make", str(store), str(blocks))
            if made.returncode != -signal.SIGKILL:
                raise SystemExit(made.stderr)
            for cache in ("dropped", "warm"):
                if cache == "dropped":
                    drop_page_cache(store)
                done = child("--reopen", str(store), str(time.time()))
                if done.returncode:
                    raise SystemExit(done.stderr)
                row = json.loads(done.stdout)
                print(
                    f"| {row['blocks']:,} | {row['segments']:,} | {row['disk_bytes'] / 1e6:,.0f} | {cache} "
                    f"| {row['open_s']:.2f} | {row['process_s']:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
