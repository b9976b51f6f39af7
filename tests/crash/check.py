"""Holds a store against the ledger of the driver that was killed over it: acked <= state <= acked + pending.

python -m tests.crash.check STORE LEDGER
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, chained_block_ids
from sarp_cluster.types import Tier, Worker
from shard.index import Index
from tests.crash.ledger import CONFIG, SECRET, SPEC, Entry, acknowledged, read_ledger

Explained = set[tuple[int, Worker, Tier, int | None]]


class Question(NamedTuple):
    """A match, and what it may answer: at least what must be there, at most what may."""

    tokens: tuple[int, ...]
    block_ids: bytes
    arguments: dict[str, Any]
    low: Answer
    high: Answer


class Bounds(NamedTuple):
    """What must be there, and what may: between the two is what was under way when the driver was killed."""

    questions: list[Question]
    blocks: tuple[int, int]
    explained: Explained
    """Each (block, worker, tier, handle) that somebody ever inserted."""


def _references_of(entries: list[Entry]) -> tuple[ReferenceIndex, ReferenceIndex]:
    """What must be there, and what may: what is not certain gives to one and takes from the other."""
    lowest, highest = ReferenceIndex(), ReferenceIndex()
    certain = acknowledged(entries)
    for entry in entries:
        operation = entry.operation
        gives = operation.kind == "insert"
        for reference, wanted in ((lowest, not gives), (highest, gives)):
            namespace = reference.create_namespace(SPEC)
            if entry.number not in certain and not wanted:
                continue
            if operation.kind == "insert":
                reference.insert(namespace, operation.block_ids, **operation.arguments())
            elif operation.kind == "remove":
                reference.remove(namespace, operation.block_ids, **operation.arguments())
            else:
                reference.clear_worker(operation.holder, **operation.arguments())
    return lowest, highest


def bounds_of(entries: list[Entry]) -> Bounds:
    """What may be answered about each sequence in the ledger, and about each worker that was ever to hold it."""
    lowest, highest = _references_of(entries)
    low_namespace, high_namespace = lowest.create_namespace(SPEC), highest.create_namespace(SPEC)
    explained: Explained = set()
    for operation in (entry.operation for entry in entries if entry.operation.kind == "insert"):
        tier = Tier(operation.tier or 0)
        for (block,) in struct.iter_unpack("<Q", operation.block_ids[8 * operation.first :]):
            explained.add((block, operation.holder, tier, operation.handle))
    named = [entry.operation for entry in entries if entry.operation.tokens]
    asked: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (tokens, {"detail": "blocks"}) for tokens in dict.fromkeys(operation.tokens for operation in named)
    ]
    for tokens, name in sorted({(operation.tokens, operation.worker) for operation in named}):
        of_one: dict[str, Any] = {"detail": "none", "workers": [Worker(name)]}
        asked += [(tokens, of_one | {"tiers": [tier]}) for tier in (Tier.GPU, Tier.CPU)]
    questions = []
    for tokens, arguments in asked:
        block_ids = chained_block_ids(tokens)
        low = lowest.match(low_namespace, block_ids, **arguments)
        high = highest.match(high_namespace, block_ids, **arguments)
        questions.append(Question(tokens, block_ids, arguments, low, high))
    return Bounds(questions, (lowest.block_count(), highest.block_count()), explained)


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


async def check_index(index: Index, bounds: Bounds) -> list[Answer]:
    """Raise AssertionError at what is wrong with an open index. Returns all answers."""
    await index.validate()
    least, most = bounds.blocks
    assert least <= index.statistics().blocks <= most, f"{index.statistics().blocks} blocks, not {least} to {most}"
    namespace = index.create_namespace(SPEC)
    answers = []
    for question in bounds.questions:
        got = Answer.of(await index.match(namespace, question.block_ids, **question.arguments))
        asked = f"{question.tokens} {question.arguments}"
        wrong = list(_explain(got, question.high, question.block_ids, bounds.explained))
        assert not wrong, f"{asked}: {wrong[:3]}"
        for what in ("verified_blocks", "matched_blocks"):
            count, least, most = getattr(got, what), getattr(question.low, what), getattr(question.high, what)
            assert least <= count <= most, f"{asked}: {what} {count}, not {least} to {most}"
        answers.append(got)
    return answers


async def _check(store: Path, ledger: Path, secret: bytes | None) -> int:
    entries = read_ledger(ledger)
    bounds = bounds_of(entries)
    before: list[Answer] | None = None
    for _ in range(2):
        index = await Index.open(store, CONFIG, secret=secret)
        try:
            answers = await check_index(index, bounds)
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
