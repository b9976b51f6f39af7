"""A router's batches: what is for one shard happens in its order, also where sequences are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Raw

from sarp_cluster.cluster.placement import slot_of
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.cluster.view import split_address
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.types import HashProfile, NamespaceSpec
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.codec import decode, encode
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.stream_client import StreamClient
from tests.local_cluster import NONCE, SECRET, LocalCluster, local_cluster

SPEC = NamespaceSpec(model="m", hash_profile=HashProfile.OPAQUE)
KEY = NamespaceKey(derive_namespace_key(SECRET, SPEC))


def chained(name: str, count: int, before: bytes = b"") -> bytes:
    ids = bytearray(before)
    for number in range(len(before) // 8, count):
        ids += hashlib.blake2b(bytes(ids[-8:]) + name.encode() + number.to_bytes(4, "little"), digest_size=8).digest()
    return bytes(ids)


def owner(slot_map: SlotMap, block_id: bytes) -> str:
    return slot_map.owner(slot_of(KEY.internal_id(block_id, 0)))


async def prepared(cluster: LocalCluster) -> tuple[StreamClient, str]:
    place = split_address(cluster.routers[0].stream_address)
    assert place is not None
    client = await StreamClient.connect(*place, control.Hello(version=1))
    request = messages.NamespaceRequest(model="m", hash_profile=HashProfile.OPAQUE)
    raw = await client.request("create_namespace", request)
    await client.request("register_worker", messages.RegisterRequest(worker="w"))
    return client, decode(raw, messages.NamespaceReply).namespace


async def batch(client: StreamClient, items: Sequence[messages.BatchItem]) -> list[Any]:
    raw = await client.request("batch", messages.BatchRequest(items=list(items)))
    return [decode(one, dict[str, Any]) for one in decode(raw, messages.BatchReply).results]


async def matched(client: StreamClient, namespace: str, block_ids: bytes) -> int:
    raw = await client.request(
        "match", messages.MatchRequest(namespace=namespace, block_ids=block_ids, deadline_ms=5_000)
    )
    answer = decode(raw, messages.MatchReply)
    assert answer.complete
    return answer.matched_blocks


def cut_between(slot_map: SlotMap) -> bytes:
    """A sequence of 128 blocks whose stretches, cut at 64, belong to different shards."""
    return next(
        ids
        for number in range(1_000)
        if owner(slot_map, (ids := chained(f"cut-{number}", 128))[:8]) != owner(slot_map, ids[64 * 8 : 65 * 8])
    )


async def test_a_cut_change_is_not_overtaken_by_the_next_one_of_its_worker(tmp_path: Path) -> None:
    """A shard that has a higher seq takes a lower one for a repetition: the change would be lost, and acknowledged."""
    names = ("s0", "s1")
    cut = cut_between(SlotMap.first(names, NONCE))
    splits = {KEY.internal_id(cut[:8], 0): 64}
    async with local_cluster(tmp_path, shards=names, splits=splits) as cluster:
        client, namespace = await prepared(cluster)
        first_owner = owner(cluster.slot_map, cut[:8])
        plain = next(
            ids for n in range(100) if owner(cluster.slot_map, (ids := chained(f"plain-{n}", 3))[:8]) == first_owner
        )
        results = await batch(
            client,
            [
                messages.InsertRequest(namespace=namespace, block_ids=cut, worker="w", seq=1),
                messages.InsertRequest(namespace=namespace, block_ids=plain, worker="w", seq=2),
            ],
        )
        assert [one["blocks_added"] for one in results] == [128, 3]
        assert await matched(client, namespace, cut) == 128
        assert await matched(client, namespace, plain) == 3
        client.close()


async def test_matches_see_the_changes_before_them_in_a_batch(tmp_path: Path) -> None:
    names = ("s0", "s1")
    cut = cut_between(SlotMap.first(names, NONCE))
    async with local_cluster(tmp_path, shards=names, splits={KEY.internal_id(cut[:8], 0): 64}) as cluster:
        client, namespace = await prepared(cluster)
        plain = chained("plain", 3)
        match_plain = messages.MatchRequest(namespace=namespace, block_ids=plain, deadline_ms=5_000)
        match_cut = messages.MatchRequest(namespace=namespace, block_ids=cut, deadline_ms=5_000)
        results = await batch(
            client,
            [
                match_cut,
                match_plain,
                messages.InsertRequest(namespace=namespace, block_ids=plain, worker="w"),
                messages.InsertRequest(namespace=namespace, block_ids=cut, worker="w"),
                match_plain,
                match_cut,
                messages.RemoveRequest(namespace=namespace, block_ids=cut, worker="w", first=100),
                match_cut,
            ],
        )
        assert [one.get("matched_blocks") for one in results] == [0, 0, None, None, 3, 128, None, 100]
        client.close()


async def test_what_was_planned_by_an_old_map_is_not_done_after_a_later_change_of_its_worker(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster:
        client, namespace = await prepared(cluster)
        slot_map = cluster.slot_map
        moves = next(ids for n in range(100) if owner(slot_map, (ids := chained(f"a-{n}", 3))[:8]) == "s0")
        stays = next(ids for n in range(100) if owner(slot_map, (ids := chained(f"b-{n}", 3))[:8]) == "s0")
        slot = slot_of(KEY.internal_id(moves[:8], 0))
        # The shards have a newer map than the router: one slot has gone to s1.
        await cluster.install(slot_map.changed(nonce=NONCE, owners={slot: "s1"}), only=("s0", "s1"))
        items = [
            messages.InsertRequest(namespace=namespace, block_ids=moves, worker="w", seq=1),
            messages.InsertRequest(namespace=namespace, block_ids=stays, worker="w", seq=2),
        ]
        late, done = await batch(client, items)
        assert late["error"]["code"] == "wrong_shard"
        assert late["error"]["outcome"] == "not_applied"
        assert done["applied"]
        # Sent again with new numbers, as a writer does, it is there.
        for seq, item in enumerate(items, 3):
            item.seq = seq
        assert [one["applied"] for one in await batch(client, items)] == [True, True]
        assert [await matched(client, namespace, ids) for ids in (moves, stays)] == [3, 3]
        client.close()


class Shards:
    """In place of router.forwarding.Links: answers from a list."""

    def __init__(self, *rounds: dict[str, Any]) -> None:
        self._rounds = [dict(one) for one in rounds]
        self.asked: list[tuple[str, messages.InsertRequest]] = []

    async def change(self, shard: str, _: str, request: messages.InsertRequest, __: float) -> Any:
        self.asked.append((shard, request))
        for one in self._rounds:
            if shard in one:
                return one.pop(shard)
        raise AssertionError(shard)


def refusal(code: str, outcome: messages.Outcome) -> messages.ErrorBody:
    return messages.ErrorBody(code=code, message="", outcome=outcome)


REPLY: Final = Raw(encode(messages.InsertReply(applied=True, durable=True, blocks_added=1, epoch=1)))


async def cut_insert(tmp_path: Path, shards: Shards, seq: int | None) -> messages.ErrorBody:
    names = ("s0", "s1")
    cut = cut_between(SlotMap.first(names, NONCE))
    async with local_cluster(tmp_path, shards=names, splits={KEY.internal_id(cut[:8], 0): 64}) as cluster:
        client, namespace = await prepared(cluster)
        cluster.routers[0].blocks._links = shards  # type: ignore[assignment]
        request = messages.InsertRequest(namespace=namespace, block_ids=cut, worker="w", seq=seq)
        try:
            with pytest.raises(RemoteError) as caught:
                await client.request("insert", request)
        finally:
            client.close()
    return caught.value.body


async def test_a_change_that_was_partly_applied_is_not_planned_anew_with_the_same_seq(tmp_path: Path) -> None:
    """Under the new map a shard may own both parts: it would take the second one for a repetition, too."""
    for first, outcome in ((REPLY, "partly_applied"), (refusal("timeout", "unknown"), "unknown")):
        (tmp_path / outcome).mkdir()
        shards = Shards({"s0": first, "s1": refusal("wrong_shard", "not_applied")})
        error = await cut_insert(tmp_path / outcome, shards, seq=1)
        assert error.outcome == outcome
        assert len(shards.asked) == 2


async def test_what_a_first_attempt_left_open_is_told(tmp_path: Path) -> None:
    again = {"s0": refusal("draining", "not_applied"), "s1": refusal("draining", "not_applied")}
    for first, outcome in ((REPLY, "partly_applied"), (refusal("timeout", "unknown"), "unknown")):
        (tmp_path / outcome).mkdir()
        shards = Shards({"s0": first, "s1": refusal("wrong_shard", "not_applied")}, again)
        error = await cut_insert(tmp_path / outcome, shards, seq=None)
        assert (error.code, error.outcome) == ("draining", outcome)
