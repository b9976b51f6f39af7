"""Holds a store against the ledger of the driver that was killed over it: acked <= state <= acked + pending.

python -m tests.crash.check STORE LEDGER
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sarp_cluster.testing.reference_index import Answer, ReferenceIndex
from sarp_cluster.types import Tier, Worker
from shard.index import Index
from tests.crash.ledger import CONFIG, SECRET, SPEC, Entry, acknowledged, read_ledger

Explained = set[tuple[int, Worker, Tier, int | None]]


class Bounds(NamedTuple):
    """What must be there, and what may: between the two is what was under way when the driver was killed."""

    lowest: ReferenceIndex
    highest: ReferenceIndex
    explained: Explained
    """Each (block, worker, tier, handle) that somebody ever inserted."""


def bounds_of(entries: list[Entry]) -> Bounds:
    """Rebuild the references from the ledger. What is not certain gives to one and takes from the other."""
    bounds = Bounds(ReferenceIndex(), ReferenceIndex(), set())
    certain = acknowledged(entries)
    for entry in entries:
        operation = entry.operation
        gives = operation.kind == "insert"
        for reference, wanted in ((bounds.lowest, not gives), (bounds.highest, gives)):
            namespace = reference.create_namespace(SPEC)
            if entry.number not in certain and not wanted:
                continue
            if operation.kind == "insert":
                reference.insert(namespace, operation.block_ids, **operation.arguments())
            elif operation.kind == "remove":
                reference.remove(namespace, operation.block_ids, **operation.arguments())
            else:
                reference.clear_worker(operation.holder, **operation.arguments())
        if gives:
            tier = Tier(operation.tier or 0)
            for (block,) in struct.iter_unpack("<Q", operation.block_ids[8 * operation.first :]):
                bounds.explained.add((block, operation.holder, tier, operation.handle))
    return bounds


def _explain(answer: Answer, highest: Answer, block_ids: bytes, explained: Explained) -> Iterator[str]:
    """What an answer has that nobody inserted, or that was taken away."""
    allowed = [{location[:2] for location in block} for block in highest.blocks or []]
    for position, locations in enumerate(answer.blocks or []):
        (block,) = struct.unpack_from("<Q", block_ids, 8 * position)
        for location in locations:
            if (block, *location) not in explained:
                yield f"block {position}: {location} was never inserted"
            elif location[:2] not in allowed[position]:
                yield f"block {position}: {location} came back"


async def _check_open(index: Index, entries: list[Entry], bounds: Bounds) -> list[Answer]:
    """Raise AssertionError at what is wrong. Returns all answers."""
    await index.validate()
    namespace = index.create_namespace(SPEC)
    lowest, highest, explained = bounds
    low_namespace, high_namespace = lowest.create_namespace(SPEC), highest.create_namespace(SPEC)
    answers = []
    sequences = {entry.operation.tokens: entry.operation.block_ids for entry in entries if entry.operation.tokens}
    held = {(entry.operation.tokens, entry.operation.worker) for entry in entries if entry.operation.tokens}
    for tokens, block_ids in sequences.items():
        got = Answer.of(await index.match(namespace, block_ids, detail="blocks"))
        low = lowest.match(low_namespace, block_ids, detail="blocks")
        high = highest.match(high_namespace, block_ids, detail="blocks")
        wrong = list(_explain(got, high, block_ids, explained))
        assert not wrong, f"{tokens}: {wrong[:3]}"
        for what in ("verified_blocks", "matched_blocks"):
            count, least, most = getattr(got, what), getattr(low, what), getattr(high, what)
            assert least <= count <= most, f"{tokens}: {what} {count}, not {least} to {most}"
        answers.append(got)
    for tokens, name in sorted(held):
        block_ids, worker = sequences[tokens], Worker(name)
        for tier in (Tier.GPU, Tier.CPU):
            got = Answer.of(await index.match(namespace, block_ids, workers=[worker], tiers=[tier]))
            least = lowest.match(low_namespace, block_ids, workers=[worker], tiers=[tier]).matched_blocks
            most = highest.match(high_namespace, block_ids, workers=[worker], tiers=[tier]).matched_blocks
            assert least <= got.matched_blocks <= most, (
                f"{name} on {tier.name}: {got.matched_blocks} blocks of {tokens}, not {least} to {most}"
            )
            answers.append(got)
    return answers


async def _check(store: Path, ledger: Path, secret: bytes | None) -> int:
    entries = read_ledger(ledger)
    bounds = bounds_of(entries)
    before: list[Answer] | None = None
    for _ in range(2):
        index = await Index.open(store, CONFIG, secret=secret)
        try:
            answers = await _check_open(index, entries, bounds)
        finally:
            await index.close()
        assert before is None or answers == before, "the second recovery answers otherwise than the first"
        before = answers
    return len(acknowledged(entries))


def check(store: Path, ledger: Path, *, secret: bytes | None = SECRET) -> int:
    """Recover the store twice and check it. Returns how many operations were acknowledged."""
    return asyncio.run(_check(store, ledger, secret))


if __name__ == "__main__":
    print(f"{check(Path(sys.argv[1]), Path(sys.argv[2]))} acknowledged operations, all there")  # noqa: T201
