"""The SDK against real nodes: every wire, through routers and straight to shards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarp_cluster import limits
from sarp_cluster.client import (
    AsyncClient,
    Client,
    DeadlineError,
    NotNowError,
    RefusedError,
    UnreachableError,
    insert_request,
    match_request,
    remove_request,
)
from sarp_cluster.client.requests import pack_block_ids, pack_tokens
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.errors import BadRequestError
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from sarp_cluster.wire import messages
from tests.local_cluster import SECRET, LocalCluster, credential, local_cluster, token_of, until

WAYS = ["http", "http-batched", "sarp", "direct"]
PATIENT_MS = 5_000


@asynccontextmanager
async def client_of(cluster: LocalCluster, way: str, **options: str) -> AsyncIterator[AsyncClient]:
    scheme = "http" if way.startswith("http") else "sarp"
    client = AsyncClient(
        cluster.urls(scheme),
        direct=way == "direct",
        batch_matches=way == "http-batched",
        **options,  # type: ignore[arg-type]
    )
    async with client:
        yield client


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_inserted_is_matched_and_what_is_removed_is_not(tmp_path: Path, way: str) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1", "s2")) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        prompt = tokens(100)
        reply = await client.insert(namespace, worker="w", tokens=prompt)
        assert (reply.applied, reply.durable, reply.blocks_added) == (True, True, 6)
        found = await client.match(namespace, tokens=np.arange(100), deadline_ms=PATIENT_MS)
        assert (found.matched_blocks, found.matched_tokens, found.complete) == (6, 96, True)
        assert [(one.worker, one.gpu) for one in found.workers] == [("w", 6)]
        removed = await client.remove(namespace, worker="w", tokens=prompt, first=4)
        assert removed.segments_changed == 1
        found = await client.match(
            namespace, block_ids=namespace.block_ids(prompt), detail="blocks", deadline_ms=PATIENT_MS
        )
        assert found.matched_blocks == 4
        assert found.blocks is not None
        assert [[one.worker for one in block] for block in found.blocks] == [["w"]] * 4
        assert (await client.match(namespace, tokens=[], deadline_ms=PATIENT_MS)).matched_blocks == 0


@pytest.mark.parametrize("way", WAYS)
async def test_a_batch_gives_each_item_its_own_result(tmp_path: Path, way: str) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        results = await client.batch(
            [
                insert_request(namespace, worker="w", tokens=tokens(32)),
                insert_request(namespace, worker="never registered", tokens=tokens(32)),
                match_request(namespace, tokens=tokens(32), deadline_ms=PATIENT_MS),
                remove_request(namespace, worker="w", tokens=tokens(32), first=1),
                match_request("no namespace", block_ids=bytes(8), deadline_ms=PATIENT_MS),
                match_request(namespace, tokens=tokens(32), deadline_ms=PATIENT_MS),
                insert_request(namespace, worker="w", block_ids=b"", first=1),
            ]
        )
        inserted, unknown, found, removed, no_namespace, less, empty = results
        assert isinstance(inserted, messages.InsertReply)
        assert isinstance(unknown, RefusedError)
        assert (unknown.code, unknown.field, unknown.outcome) == ("unknown_worker", "worker", "not_applied")
        assert isinstance(found, messages.MatchReply)
        assert isinstance(less, messages.MatchReply)
        assert (found.matched_blocks, less.matched_blocks) == (2, 1)
        assert isinstance(removed, messages.RemoveReply)
        assert isinstance(no_namespace, RefusedError)
        assert no_namespace.code == "unknown_namespace"
        assert isinstance(empty, RefusedError)
        assert empty.code == "bad_request"


@pytest.mark.parametrize("way", WAYS)
async def test_errors_say_what_a_node_says(tmp_path: Path, way: str) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("llama")
        with pytest.raises(RefusedError) as caught:
            await client.insert(namespace, worker="w", tokens=tokens(32))
        assert (caught.value.code, caught.value.outcome) == ("unknown_worker", "not_applied")
        await client.register_worker("w")
        wrong: list[dict[str, Any]] = [{"first": 9}, {"offset": 1, "root": 1}, {"handle": 2**64 - 1, "first": 2}]
        for fields in wrong:
            with pytest.raises(RefusedError) as caught:
                await client.insert(namespace, worker="w", tokens=tokens(32), **fields)
            assert (caught.value.code, caught.value.outcome) == ("bad_request", "not_applied")
        with pytest.raises(RefusedError) as caught:
            await client.match(namespace, block_ids=b"1234567", deadline_ms=PATIENT_MS)
        assert (caught.value.code, caught.value.field) == ("bad_request", "block_ids")


async def test_workers_are_registered_cleared_drained_and_deregistered(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster, client_of(cluster, "http") as client:
        namespace = await client.namespace("llama")
        worker = Worker("w", 3)
        assert (await client.register_worker(worker, heartbeat_ttl_ms=60_000)).state == "live"
        await client.heartbeat(worker)
        await client.insert(namespace, worker=worker, tokens=tokens(32))
        assert (await client.clear_worker(worker)).generation == 1
        assert (await client.match(namespace, tokens=tokens(32), deadline_ms=PATIENT_MS)).matched_blocks == 0
        with pytest.raises(RefusedError) as caught:
            await client.insert(namespace, worker=worker, tokens=tokens(32))
        assert (caught.value.code, caught.value.field) == ("stale_generation", "generation")
        await client.insert(namespace, worker=worker, tokens=tokens(32), generation=1)
        assert (await client.drain_worker(worker)).state == "draining"
        assert [one.state for one in await client.workers()] == ["draining"]
        assert (await client.deregister_worker(worker)).state == "gone"
        with pytest.raises(RefusedError):
            await client.heartbeat(worker)


async def test_heartbeats_go_on_while_the_block_lasts(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster, client_of(cluster, "sarp") as client:
        await client.register_worker("w", heartbeat_ttl_ms=60_000)
        heard = cluster.routers[0]._heard
        async with client.heartbeats("w", interval_s=0.001):
            while not heard:
                heard = cluster.routers[0]._heard
                await asyncio.sleep(0.001)
        assert heard == {Worker("w")}


async def test_the_cluster_is_seen_and_told(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster, client_of(cluster, "http") as client:
        seen = await client.cluster()
        assert [one.shard for one in seen.shards] == ["s0", "s1"]
        assert [event.number for event in await client.events(after=2, limit=2)] == [3, 4]
        assert (await client.slots()).shards == ["s0", "s1"]
        await client.snapshot_shard("s0")
        await client.drain_shard("a name/with%all? of it")
        assert cluster.coordinator.commands == ["s0", "a name/with%all? of it"]
        assert await client.purge_tenant("default") == 1
        assert await client.purge_tenant("default") == 2


@pytest.mark.parametrize("way", ["sarp", "direct"])
async def test_after_a_purge_nothing_from_before_is_found_and_what_comes_after_it_is(tmp_path: Path, way: str) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1", "s2")) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        await client.insert(namespace, worker="w", tokens=tokens(160))
        await client.purge_tenant("default")
        # The namespace has another key now, which places what it has elsewhere. The client still has the old one.
        assert (await client.match(namespace, tokens=tokens(160), deadline_ms=PATIENT_MS)).matched_blocks == 0
        for start in range(0, 5_000, 500):
            await client.insert(namespace, worker="w", tokens=tokens(160, start))
            found = await client.match(namespace, tokens=tokens(160, start), deadline_ms=PATIENT_MS)
            assert (found.matched_blocks, found.complete) == (10, True)


async def test_a_credential_that_may_only_match_finds_a_namespace_that_is_there(tmp_path: Path) -> None:
    credentials = [credential("writer", "match", "insert"), credential("reader", "match")]
    async with (
        local_cluster(tmp_path, credentials=credentials) as cluster,
        client_of(cluster, "http", credential=token_of("reader")) as reader,
        client_of(cluster, "sarp", credential=token_of("writer")) as writer,
    ):
        with pytest.raises(RefusedError) as caught:
            await reader.namespace("llama")
        assert caught.value.code == "forbidden"
        made = await writer.namespace("llama", salt="s", hash_profile="opaque")
        found = await reader.namespace("llama", salt="s", hash_profile=HashProfile.OPAQUE)
        assert found.id == made.id


@pytest.mark.parametrize("way", ["http", "sarp"])
async def test_a_credential_that_is_not_known_is_refused_at_once(tmp_path: Path, way: str) -> None:
    async with (
        local_cluster(tmp_path, credentials=[credential("a", "match")]) as cluster,
        client_of(cluster, way, credential="wrong") as client,
    ):
        for _ in range(2):
            with pytest.raises(RefusedError) as caught:
                await client.workers()
            assert caught.value.code == "unauthenticated"


@pytest.mark.parametrize("scheme", ["http", "sarp"])
async def test_nobody_there_is_said_at_once(scheme: str) -> None:
    async with AsyncClient(f"{scheme}://127.0.0.1:1") as client:
        with pytest.raises(UnreachableError) as caught:
            await client.insert("n", worker="w", block_ids=[1])
        assert (caught.value.code, caught.value.outcome) == ("connection_lost", "not_applied")
        with pytest.raises(UnreachableError):
            await client.match("n", block_ids=[1], deadline_ms=PATIENT_MS)


@pytest.mark.parametrize("way", ["http", "sarp"])
async def test_the_next_router_is_asked_when_one_is_gone(tmp_path: Path, way: str) -> None:
    async with local_cluster(tmp_path, routers=2) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        await client.insert(namespace, worker="w", tokens=tokens(32))
        await cluster.stop("router-0")
        cluster.routers.pop(0)
        for _ in range(3):
            found = await client.match(namespace, tokens=tokens(32), deadline_ms=PATIENT_MS)
            assert found.matched_blocks == 2
        assert (await client.insert(namespace, worker="w", tokens=tokens(48))).applied


async def test_a_direct_client_obeys_a_new_map(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster, client_of(cluster, "direct") as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        prompt = tokens(16 * 130)
        await client.insert(namespace, worker="w", tokens=prompt[:64])
        key = NamespaceKey(derive_namespace_key(SECRET, NamespaceSpec(model="llama")))
        ids = namespace.block_ids(prompt)
        splits = {key.internal_id(ids[:8], 0): 64, key.internal_id(ids[64 * 8 : 65 * 8], 0): 128}
        await cluster.install(cluster.slot_map.changed(nonce=bytes(16), splits=splits))
        assert (await client.insert(namespace, worker="w", tokens=prompt, first=0)).applied
        found = await client.match(namespace, tokens=prompt, deadline_ms=PATIENT_MS)
        assert (found.matched_blocks, found.complete, found.epoch) == (130, True, 2)
        assert [(one.worker, one.gpu, one.remote) for one in found.workers] == [("w", 130, 130)]


async def test_a_match_whose_shard_is_gone_is_shorter_and_says_why(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster, client_of(cluster, "direct") as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        prompts = [tokens(32, start) for start in range(0, 3_200, 100)]
        for prompt in prompts:
            await client.insert(namespace, worker="w", tokens=prompt)
        await cluster.stop("s1")
        del cluster.shards["s1"]
        answers = [await client.match(namespace, tokens=one, deadline_ms=PATIENT_MS) for one in prompts]
        assert {(one.matched_blocks, one.complete, tuple(one.degraded)) for one in answers} == {
            (2, True, ()),
            (0, False, ("shard_down",)),
        }
        outcomes = set()
        for prompt in prompts:
            try:
                await client.insert(namespace, worker="w", tokens=prompt)
            except (UnreachableError, NotNowError) as error:
                outcomes.add((error.code, error.outcome))
        assert outcomes == {("connection_lost", "not_applied")}


async def test_matches_of_one_turn_go_as_one_batch(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster, client_of(cluster, "http-batched") as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        await client.insert(namespace, worker="w", tokens=tokens(64))
        answers = await asyncio.gather(
            *(client.match(namespace, tokens=tokens(16 * n), deadline_ms=PATIENT_MS) for n in range(1, 7)),
            client.match("nothing", block_ids=[1], deadline_ms=PATIENT_MS),
            return_exceptions=True,
        )
        assert [one.matched_blocks for one in answers[:-1] if isinstance(one, messages.MatchReply)] == [
            1,
            2,
            3,
            4,
            4,
            4,
        ]
        assert isinstance(answers[-1], RefusedError)
        assert client._batches is not None
        assert client._batches.batches == 1


async def test_code_without_asyncio_has_a_client_too(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:

        def use() -> int:
            with Client(cluster.url) as client:
                namespace = client.namespace("llama")
                client.register_worker("w")
                with client.writer("w") as writer, client.heartbeats("w"):
                    writer.insert(namespace, tokens=tokens(64))
                    writer.remove(namespace, tokens=tokens(64), first=3)
                    with pytest.raises(RefusedError):
                        writer.insert(namespace, block_ids=b"1")
                found = client.match(namespace, tokens=tokens(64), deadline_ms=PATIENT_MS).matched_blocks
                with pytest.raises(ZeroDivisionError), client.writer("w"):
                    raise ZeroDivisionError
            with pytest.raises(ValueError, match="closed"):
                client.workers()
            return found

        assert await asyncio.to_thread(use) == 3


@pytest.mark.parametrize("way", ["sarp", "direct"])
async def test_a_writer_goes_on_where_a_shard_was_started_again(tmp_path: Path, way: str) -> None:
    """Whatever was given while the shard was away is there in the end, in its order."""
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("llama")
        await client.register_worker("w")
        prompts = [tokens(64, start) for start in range(0, 3_200, 100)]
        async with client.writer("w") as writer:
            await writer.insert(namespace, tokens=prompts[0])
            await cluster.stop("s1")
            waiting: list[asyncio.Task[Any]] = []
            for number, prompt in enumerate(prompts):
                waiting.append(asyncio.create_task(writer.insert(namespace, tokens=prompt)))
                if number % 2:
                    waiting.append(asyncio.create_task(writer.remove(namespace, tokens=prompt, first=1)))
            await until(lambda: writer.retries > 1)
            await cluster.restart("s1")
            await asyncio.gather(*waiting)
        found = [await client.match(namespace, tokens=one, deadline_ms=PATIENT_MS) for one in prompts]
        assert [one.matched_blocks for one in found] == [1 if number % 2 else 4 for number in range(len(prompts))]
        assert all(one.complete for one in found)


@pytest.mark.parametrize("scheme", ["http", "sarp"])
async def test_a_node_that_does_not_answer_costs_no_more_than_the_deadline(scheme: str) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            pass
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    async with AsyncClient(f"{scheme}://127.0.0.1:{port}") as client:
        began = loop.time()
        found = await client.match("n", block_ids=[1], deadline_ms=50)
        assert (found.matched_blocks, found.complete, found.degraded) == (0, False, ["deadline"])
        with pytest.raises(DeadlineError) as caught:
            await client.insert("n", worker="w", block_ids=[1], deadline_ms=50)
        assert caught.value.outcome == ("unknown" if scheme == "http" else "not_applied")
        assert loop.time() - began < 5
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("way", ["http", "sarp"])
async def test_a_request_may_be_as_long_as_the_limits_say(tmp_path: Path, way: str) -> None:
    async with local_cluster(tmp_path) as cluster, client_of(cluster, way) as client:
        namespace = await client.namespace("m", hash_profile="opaque")
        longest = np.arange(1, limits.REQUEST_BLOCKS_MAX + 1)
        assert (await client.match(namespace, block_ids=longest, deadline_ms=PATIENT_MS)).complete
        with pytest.raises(RefusedError) as caught:
            await client.match(namespace, block_ids=np.append(longest, 0), deadline_ms=PATIENT_MS)
        assert (caught.value.code, caught.value.field) == ("too_large", "block_ids")
        over = [match_request(namespace, block_ids=longest)] * (limits.BATCH_BYTES_MAX // longest.nbytes + 1)
        with pytest.raises(RefusedError) as caught:
            await client.batch(over, deadline_ms=PATIENT_MS)
        assert caught.value.code == "too_large"
        with pytest.raises(RefusedError) as caught:
            await client.insert(namespace, worker="w", block_ids=[1], handle=2**70)
        assert (caught.value.code, caught.value.outcome) == ("bad_request", "not_applied")


@pytest.mark.parametrize(
    "given",
    [[1, 2**64 - 1], np.array([1, 2**64 - 1], dtype=np.uint64), memoryview(bytes([1, *bytes(7), *[255] * 8]))],
    ids=["list", "array", "memoryview"],
)
def test_block_ids_are_taken_in_every_form_in_which_engines_have_them(given: Any) -> None:
    assert pack_block_ids(given) == bytes([1, *bytes(7), *[255] * 8])


@pytest.mark.parametrize("given", [[-1], [2**32], ["1"], [1.5], np.array([-1]), np.array([1.5]), np.array([[1]])])
def test_tokens_that_are_none_are_refused_by_name(given: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        pack_tokens(given)
    assert caught.value.field == "tokens"


def test_tokens_of_any_integer_type_are_the_same() -> None:
    for kind in (np.int32, np.int64, np.uint32, np.uint16, ">u4"):
        assert pack_tokens(np.array([1, 500], dtype=kind)) == pack_tokens([1, 500]) == bytes([1, 0, 0, 0, 244, 1, 0, 0])
