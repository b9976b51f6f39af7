"""A client that asks shards itself gets what it would get from a router, and what is there."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarp_cluster.client import AsyncClient, insert_request, match_request, remove_request
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.types import HashProfile, NamespaceSpec
from sarp_cluster.wire import messages
from tests.local_cluster import SECRET, LocalCluster, local_cluster

SPEC = NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE)
KEY = NamespaceKey(derive_namespace_key(SECRET, SPEC))
WORKERS = ("a", "b", "c")
PATIENT_MS = 20_000
TIERS: list[list[messages.TierName] | None] = [None, ["gpu"], ["cpu"]]


def family(rng: random.Random) -> list[list[int]]:
    """Sequences that share prefixes."""
    found: list[list[int]] = []
    for _ in range(rng.randrange(2, 8)):
        before = rng.choice(found) if found and rng.random() < 0.8 else []
        kept = before[: rng.randrange(len(before) + 1)]
        found.append(kept + [rng.getrandbits(64) for _ in range(rng.choice([1, 5, 64, 70, 130]))])
    return found


def some_splits(rng: random.Random, sequences: list[list[int]]) -> dict[int, int]:
    """Cuts of these sequences, at one to three positions each; some of them beyond their ends."""
    splits = {}
    for sequence in sequences:
        position = 0
        for _ in range(rng.randrange(4)):
            after = position + 64 * rng.randrange(1, 3)
            splits[KEY.internal_id(sequence[position].to_bytes(8, "little"), 0)] = after
            if after >= len(sequence):
                break
            position = after
    return splits


class Model:
    """Who holds which block on the GPU, block by block: chained IDs need no more."""

    def __init__(self) -> None:
        self.held: dict[int, set[str]] = {}

    def insert(self, worker: str, sequence: list[int], first: int) -> None:
        for block in sequence[first:]:
            self.held.setdefault(block, set()).add(worker)

    def remove(self, worker: str, sequence: list[int], first: int, last: int) -> None:
        for block in sequence[first:last]:
            self.held.get(block, set()).discard(worker)

    def matched(self, sequence: list[int], workers: tuple[str, ...]) -> tuple[int, dict[str, int]]:
        count = next(
            (i for i, one in enumerate(sequence) if not self.held.get(one, set()) & set(workers)), len(sequence)
        )
        reach = {
            worker: next((i for i, one in enumerate(sequence) if worker not in self.held.get(one, ())), len(sequence))
            for worker in workers
        }
        return count, {worker: length for worker, length in reach.items() if length}


def queries(rng: random.Random, namespace: Any, sequences: list[list[int]]) -> list[messages.MatchRequest]:
    found = []
    for sequence in sequences:
        query = sequence[: rng.randrange(1, len(sequence) + 1)] + [rng.getrandbits(64)] * rng.randrange(2)
        found.append(
            match_request(
                namespace,
                block_ids=query,
                detail=rng.choice(["none", "workers", "blocks"]),
                workers=rng.choice([None, WORKERS[:1], WORKERS[1:]]),
                tiers=rng.choice(TIERS),
                max_workers=rng.choice([None, 1, 2]),
                deadline_ms=PATIENT_MS,
            )
        )
    return found


async def ask(client: AsyncClient, request: messages.MatchRequest) -> messages.MatchReply:
    return await client.match(
        request.namespace,
        block_ids=request.block_ids if isinstance(request.block_ids, bytes) else None,
        detail=request.detail,
        tiers=request.tiers,
        workers=None if request.workers is None else [one.worker for one in request.workers],
        max_workers=request.max_workers,
        deadline_ms=PATIENT_MS,
    )


async def change_something(
    rng: random.Random, clients: list[AsyncClient], namespace: Any, sequences: list[list[int]], model: Model
) -> None:
    worker, sequence = rng.choice(WORKERS), rng.choice(sequences)
    first = rng.randrange(len(sequence))
    client = rng.choice(clients)
    if rng.random() < 0.7:
        first = rng.choice([0, 0, first])
        item: messages.InsertRequest | messages.RemoveRequest
        item = insert_request(namespace, block_ids=sequence, worker=worker, first=first)
        model.insert(worker, sequence, first)
    else:
        last = rng.randrange(first + 1, len(sequence) + 1)
        item = remove_request(namespace, block_ids=sequence, worker=worker, first=first, last=last)
        model.remove(worker, sequence, first, last)
    item.deadline_ms = PATIENT_MS
    if rng.random() < 0.5:
        await client.send(item)
    else:
        (result,) = await client.batch([item])
        assert isinstance(result, messages.InsertReply | messages.RemoveReply)


async def compare(
    rng: random.Random,
    routed: AsyncClient,
    direct: AsyncClient,
    namespace: Any,
    sequences: list[list[int]],
    model: Model,
) -> None:
    asked = queries(rng, namespace, sequences)
    by_router = [await ask(routed, one) for one in asked]
    by_shards = [await ask(direct, one) for one in asked]
    assert by_shards == by_router
    assert await direct.batch(asked) == by_router
    assert await routed.batch(asked) == by_router
    for request, reply in zip(asked, by_router, strict=True):
        assert reply.complete
        assert isinstance(request.block_ids, bytes)
        query = memoryview(request.block_ids).cast("Q").tolist()
        workers = WORKERS if request.workers is None else tuple(one.worker for one in request.workers)
        matched, reach = model.matched(query, workers)
        if request.tiers == ["cpu"]:
            matched, reach = 0, {}  # all is on the GPU
        assert reply.matched_blocks == matched
        if request.detail != "none" and request.max_workers is None:
            assert {one.worker: one.gpu for one in reply.workers} == reach


async def prepared(cluster: LocalCluster, routed: AsyncClient, direct: AsyncClient) -> Any:
    for worker in WORKERS:
        await routed.register_worker(worker)
    return await direct.namespace("m", hash_profile="opaque")


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
async def test_a_client_that_asks_shards_itself_gets_what_a_router_answers(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    sequences = family(rng)
    directory = tmp_path_factory.mktemp("cluster")
    async with (
        local_cluster(directory, shards=("s0", "s1", "s2"), splits=some_splits(rng, sequences)) as cluster,
        AsyncClient(cluster.urls("sarp")) as routed,
        AsyncClient(cluster.urls("sarp"), direct=True) as direct,
    ):
        namespace, model = await prepared(cluster, routed, direct), Model()
        for _ in range(3):
            for _ in range(6):
                await change_something(rng, [routed, direct], namespace, sequences, model)
            await compare(rng, routed, direct, namespace, sequences, model)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
async def test_answers_are_right_whatever_map_the_client_still_has(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Splits come and go while nothing is held: moving what is there is not the client's business."""
    rng = random.Random(seed)
    directory = tmp_path_factory.mktemp("cluster")
    async with (
        local_cluster(directory, shards=("s0", "s1", "s2")) as cluster,
        AsyncClient(cluster.urls("sarp")) as routed,
        AsyncClient(cluster.urls("sarp"), direct=True) as direct,
    ):
        namespace = await prepared(cluster, routed, direct)
        for _ in range(3):
            sequences, model = family(rng), Model()
            slot_map = cluster.slot_map.changed(nonce=bytes(16), splits=some_splits(rng, sequences))
            await cluster.install(slot_map)
            await change_something(rng, [direct], namespace, sequences, model)
            for _ in range(4):
                await change_something(rng, [routed, direct], namespace, sequences, model)
            await compare(rng, routed, direct, namespace, sequences, model)
