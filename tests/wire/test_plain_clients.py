"""Whoever has read the protocol can speak it: clients with none of our code, against a real shard."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.local_cluster import LocalCluster, local_cluster
from tests.wire.plain_clients import JSON, MSGPACK, PlainHttp, PlainStream

IDS = [2**64 - 1, 5, 77]
PACKED = struct.pack("<3Q", *IDS)
OPAQUE = {"model": "m", "hash_profile": "opaque"}


def http_url(cluster: LocalCluster) -> str:
    return f"http://{cluster.shards['s0'].life.http_address}"


@pytest.mark.parametrize("media", [MSGPACK, JSON])
async def test_over_http(tmp_path: Path, media: str) -> None:
    async with local_cluster(tmp_path, routers=0) as cluster, PlainHttp(http_url(cluster)) as http:

        async def ask(method: str, path: str, body: Any = None) -> Any:
            answer = await http.ask(method, path, body, media=media)
            assert answer.status == 200, answer
            assert answer.headers["Content-Type"] == media
            return answer.body

        namespace = (await ask("POST", "/v1/namespaces", OPAQUE))["namespace"]
        assert [one["model"] for one in (await ask("GET", "/v1/namespaces"))["namespaces"]] == ["m"]
        worker = await ask("POST", "/v1/workers/register", {"worker": "w", "dp_rank": 1})
        assert worker == {"worker": "w", "dp_rank": 1, "generation": 0, "heartbeat_ttl_ms": 0, "state": "live"}
        change = {"namespace": namespace, "worker": "w", "dp_rank": 1}
        packed: Any = PACKED if media == MSGPACK else base64.b64encode(PACKED).decode()
        inserted = await ask("POST", "/v1/insert", {**change, "block_ids": packed, "seq": 1, "handle": 2**64 - 1})
        assert inserted == {"applied": True, "durable": True, "blocks_added": 3, "epoch": 1}
        for ids in (packed, IDS):
            found = await ask("POST", "/v1/match", {"namespace": namespace, "block_ids": ids, "deadline_ms": 5_000})
            assert found == {
                "matched_blocks": 3,
                "matched_tokens": 48,
                "workers": [{"worker": "w", "dp_rank": 1, "gpu": 3, "cpu": 3, "ssd": 3, "remote": 3}],
                "truncated": False,
                "complete": True,
                "degraded": [],
                "epoch": 1,
            }
        items = [
            {"op": "remove", **change, "block_ids": packed, "first": 1, "seq": 2},
            {"op": "match", "namespace": namespace, "block_ids": packed, "detail": "blocks", "deadline_ms": 5_000},
            {"op": "insert", **change, "block_ids": packed, "seq": 2},
        ]
        removed, matched, repeated = (await ask("POST", "/v1/batch", {"items": items}))["results"]
        assert removed == {"applied": True, "segments_changed": 1, "durable": True, "epoch": 1}
        assert matched["blocks"] == [[{"worker": "w", "dp_rank": 1, "tier": "gpu", "handle": 2**64 - 1}]]
        assert repeated["applied"] is False
        again = await ask("POST", "/v1/remove", {**change, "block_ids": packed, "seq": 2})
        assert again == {"applied": False, "segments_changed": 0, "durable": True, "epoch": 1}
        slots = await ask("GET", "/v1/slots")
        assert slots["shards"] == ["s0"]
        assert (await ask("POST", "/v1/workers/clear", {"worker": "w", "dp_rank": 1}))["generation"] == 1


async def test_tokens_are_hashed_by_the_node(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, routers=0) as cluster, PlainHttp(http_url(cluster)) as http:
        made = await http.ask("POST", "/v1/namespaces", {"model": "llama", "block_size": 2})
        namespace = made.body["namespace"]
        await http.ask("POST", "/v1/workers/register", {"worker": "w"})
        tokens: list[Any] = [[1, 2, 3, 4, 5], struct.pack("<5I", 1, 2, 3, 4, 5)]
        inserted = await http.ask("POST", "/v1/insert", {"namespace": namespace, "worker": "w", "token_ids": tokens[0]})
        assert inserted.body["blocks_added"] == 2
        for given in tokens:
            found = await http.ask(
                "POST", "/v1/match", {"namespace": namespace, "token_ids": given, "deadline_ms": 5_000}
            )
            assert (found.body["matched_blocks"], found.body["matched_tokens"]) == (2, 4)


async def test_over_the_stream(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, routers=0) as cluster:
        stream = await PlainStream.connect(cluster.shards["s0"].life.stream_address)
        well, welcome = await stream.ask("hello", {"version": 7})
        assert well
        assert welcome == {"version": 1, "features": [], "cluster": "cluster-for-tests", "node": "s0"}
        well, made = await stream.ask("create_namespace", OPAQUE)
        namespace = made["namespace"]
        assert (await stream.ask("register_worker", {"worker": "w"}))[0]
        change = {"namespace": namespace, "worker": "w", "block_ids": PACKED}
        assert await stream.ask("insert", change) == (
            True,
            {"applied": True, "durable": True, "blocks_added": 3, "epoch": 1},
        )
        assert await stream.ask("ping", {}) == (True, {"done": True})
        # Many at once; answers come in any order, by number.
        numbers = [
            stream.send("match", {"namespace": namespace, "block_ids": PACKED[: 8 * n], "deadline_ms": 5_000})
            for n in range(4)
        ]
        answers = {number: body for number, _, body in [await stream.receive() for _ in numbers]}
        assert [answers[number]["matched_blocks"] for number in numbers] == [0, 1, 2, 3]
        # An error is an answer; the connection goes on.
        well, failed = await stream.ask("insert", {**change, "worker": "unknown"})
        assert not well
        assert failed["error"]["code"] == "unknown_worker"
        assert failed["error"]["outcome"] == "not_applied"
        assert (await stream.ask("match", {"namespace": namespace, "block_ids": PACKED}))[0]
        stream.close()


async def test_people_see_pages_and_probes_without_a_credential(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, routers=0) as cluster, PlainHttp(http_url(cluster)) as http:
        for path, text in (("/healthz", "ok"), ("/readyz", "ready"), ("/metrics", "sarp_shard_"), ("/", "<html")):
            answer = await http.raw("GET", path, None, {})
            assert answer.status == 200
            assert text in answer.body
