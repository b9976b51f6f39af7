"""Whatever is sent, the answer is the reply or a stable code that names what was wrong; never anything else."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire.codec import JSON, MSGPACK, decode
from sarp_cluster.wire.control import Hello
from sarp_cluster.wire.faults import STATUS
from sarp_cluster.wire.operations import OPERATIONS
from tests.local_cluster import LocalCluster, local_cluster
from tests.wire.plain_clients import PlainHttp, PlainStream

REQUESTS: list[type[Any]] = [Hello, *(operation.request for operation in OPERATIONS.values())]
IDS = struct.pack("<3Q", 1, 2, 3)
GOOD: dict[str, dict[str, Any]] = {
    "match": {
        "namespace": "n",
        "block_ids": IDS,
        "detail": "blocks",
        "tiers": ["gpu", "cpu"],
        "workers": [{"worker": "w", "dp_rank": 3}],
        "max_workers": 3,
        "deadline_ms": 100,
    },
    "insert": {"namespace": "n", "block_ids": [1, 2], "worker": "w", "seq": 1, "tier": "ssd", "handle": 7, "root": 5},
    "remove": {"namespace": "n", "token_ids": IDS[:4], "worker": "w", "first": 1, "last": 2, "generation": 1},
    "batch": {"items": [{"op": "match", "namespace": "n"}, {"op": "remove", "namespace": "n", "worker": "w"}]},
    "create_namespace": {"model": "m", "lora": "l", "salt": "s", "block_size": 16, "hash_profile": "xxh3"},
    "register_worker": {"worker": "w", "dp_rank": 1, "heartbeat_ttl_ms": 5},
    "heartbeat": {"workers": [{"worker": "w"}, {"worker": "v", "dp_rank": 2}]},
    "clear_worker": {"worker": "w", "generation": 3},
    "events": {"after": 1, "limit": 2},
}  # fmt: skip

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
HEADS = [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"]
HEADS += [
    b"\xc4\xff",
    b"\xc5\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xd9\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
]
"""MessagePack arrays, maps, binaries, texts and extensions whose stated length is not there."""


def read(raw: bytes, kind: type[Any], media: str = MSGPACK) -> Any:
    """The message, or the name of what was wrong."""
    try:
        return decode(raw, kind, media)
    except BadRequestError as refused:
        error = refused
    assert error.code == "bad_request"
    assert error.field
    assert str(error).startswith(f"{error.field}: ")
    return error.field


@given(st.binary(max_size=64), st.sampled_from(REQUESTS), st.sampled_from([MSGPACK, JSON]))
def test_any_bytes_are_a_message_or_refused_by_field(raw: bytes, kind: type[Any], media: str) -> None:
    read(raw, kind, media)


@given(JUNK, st.sampled_from(REQUESTS))
def test_any_value_is_a_message_or_refused_by_field(value: Any, kind: type[Any]) -> None:
    read(msgpack.packb(value), kind)


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_a_field_of_another_type_is_refused_by_its_name(name: str, data: st.DataObject) -> None:
    body = dict(GOOD[name])
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = data.draw(JUNK)
    found = read(msgpack.packb(body), OPERATIONS[name].request)
    if isinstance(found, str):
        assert found.split(".")[0].split("[")[0] in (field, "body")
        assert found != "body" or isinstance(body[field], str | dict | list)  # not UTF-8, or a wrong tag inside


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_body_cut_off_anywhere_is_refused(name: str) -> None:
    kind = OPERATIONS[name].request
    whole = msgpack.packb(GOOD[name])
    assert not isinstance(read(whole, kind), str)
    assert {read(whole[:length], kind) for length in range(len(whole))} == {"body"}
    text = json.dumps(GOOD[name], default=lambda raw: "AAAAAAAAAAA=").encode()
    assert not isinstance(read(text, kind, JSON), str)
    assert {read(text[:length], kind, JSON) for length in range(len(text))} == {"body"}


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize("head", HEADS, ids=bytes.hex)
def test_a_length_that_is_not_there_is_refused_before_room_is_made_for_it(name: str, head: bytes) -> None:
    kind = OPERATIONS[name].request
    read(head, kind)
    for field in [*GOOD[name], "unknown"]:
        raw = b"\x81" + msgpack.packb(field) + head
        assert isinstance(read(raw, kind), str)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_an_unknown_field_is_refused_by_its_name(name: str) -> None:
    kind = OPERATIONS[name].request
    assert read(msgpack.packb(GOOD[name] | {"unheard_of": 1}), kind) == "unheard_of"
    assert read(b"{" + b'"unheard_of":1}', kind, JSON) == "unheard_of"


def test_nesting_without_end_is_refused() -> None:
    for kind in REQUESTS:
        assert isinstance(read(b"\x91" * 200_000, kind), str)
        assert isinstance(read(b"\x81\xa1a" * 200_000, kind), str)
        assert isinstance(read(b"[" * 200_000, kind, JSON), str)
        assert isinstance(read(b'{"a":' * 200_000, kind, JSON), str)


# --- on both wires ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def nodes(directory: Path) -> AsyncIterator[tuple[LocalCluster, list[str], list[str]]]:
    """A cluster; HTTP and stream addresses of its shard and its router."""
    async with local_cluster(directory) as cluster:
        shard, router = cluster.shards["s0"], cluster.routers[0]
        yield (
            cluster,
            [f"http://{shard.life.http_address}", f"http://{router.http_address}"],
            [shard.life.stream_address, router.stream_address],
        )


def bad(**fields: Any) -> dict[str, Any]:
    return fields


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    # operation, what differs from a good request, code, field
    ("match", bad(block_ids=None), "bad_request", "block_ids"),
    ("match", bad(token_ids=b"1234"), "bad_request", "block_ids"),
    ("match", bad(block_ids=b"1234567"), "bad_request", "block_ids"),
    ("match", bad(block_ids=None, token_ids=b"12345"), "bad_request", "token_ids"),
    ("match", bad(block_ids=[-1]), "bad_request", "block_ids"),
    ("match", bad(block_ids=None, token_ids=[2**32]), "bad_request", "token_ids"),
    ("match", bad(block_ids=bytes(8 * limits.REQUEST_BLOCKS_MAX + 8)), "too_large", "block_ids"),
    ("match", bad(detail="all"), "bad_request", "detail"),
    ("match", bad(tiers=["hbm"]), "bad_request", "tiers[0]"),
    ("match", bad(max_workers=0), "bad_request", "max_workers"),
    ("match", bad(deadline_ms=0), "bad_request", "deadline_ms"),
    ("match", bad(deadline_ms=limits.DEADLINE_MS_MAX + 1), "bad_request", "deadline_ms"),
    ("match", bad(workers=[{"worker": ""}]), "bad_request", "workers[0].worker"),
    ("match", bad(workers=[{"worker": "é" * 200}]), "bad_request", "workers"),
    ("match", bad(namespace="unknown"), "unknown_namespace", "namespace"),
    ("match", bad(epoch=2**64 - 1), "bad_request", "epoch"),
    ("insert", bad(worker="unknown"), "unknown_worker", "worker"),
    ("insert", bad(worker="w" * 256), "bad_request", "worker"),
    ("insert", bad(dp_rank=limits.DP_RANK_MAX + 1), "bad_request", "dp_rank"),
    ("insert", bad(first=3), "bad_request", "first"),
    ("insert", bad(first=-1), "bad_request", "first"),
    ("insert", bad(offset=64, first=64), "bad_request", "root"),
    ("insert", bad(offset=64, first=65, root=7), "bad_request", "offset"),
    ("insert", bad(offset=64, first=128, root=2**64 - 1, block_ids=bytes(8 * 65)), "unknown_prefix", "offset"),
    ("insert", bad(handle=-1), "bad_request", "handle"),
    ("insert", bad(seq=2**63), "bad_request", "seq"),
    ("insert", bad(seq=-1), "bad_request", "seq"),
    ("insert", bad(tier="hbm"), "bad_request", "tier"),
    ("insert", bad(durable=1), "bad_request", "durable"),
    ("insert", bad(block_ids=b""), "bad_request", "block_ids"),
    ("insert", bad(root=b"1234567"), "bad_request", "root"),
    ("remove", bad(first=2, last=2), "bad_request", "first"),
    ("remove", bad(last=4), "bad_request", "last|first"),
    ("remove", bad(last=0), "bad_request", "last|first"),
    ("batch", bad(items=[]), "bad_request", "items"),
    ("batch", bad(items=[{"op": "purge"}]), "bad_request", "items[0].op"),
    ("batch", bad(items=[{"namespace": "n"}]), "bad_request", "items[0].op"),
    ("create_namespace", bad(model=""), "bad_request", "model"),
    ("create_namespace", bad(salt="é" * 200), "bad_request", "salt"),
    ("create_namespace", bad(block_size=0), "bad_request", "block_size"),
    ("create_namespace", bad(hash_profile="md5"), "bad_request", "hash_profile"),
    ("register_worker", bad(worker="é" * 200), "bad_request", "worker"),
    ("heartbeat", bad(workers=[]), "bad_request", "workers"),
    ("heartbeat", bad(workers=[{"worker": "unknown"}]), "unknown_worker", "worker"),
    ("clear_worker", bad(worker="unknown"), "unknown_worker", "worker"),
    ("purge_tenant", bad(tenant=""), "bad_request", "tenant"),
]


async def good_requests(http: PlainHttp) -> dict[str, dict[str, Any]]:
    """A request of each operation that is done as it is."""
    made = await http.ask("POST", "/v1/namespaces", {"model": "m", "block_size": 1})
    await http.ask("POST", "/v1/workers/register", {"worker": "w"})
    change = {"namespace": made.body["namespace"], "worker": "w", "block_ids": IDS}
    return {
        "match": {"namespace": made.body["namespace"], "block_ids": IDS},
        "insert": change,
        "remove": change,
        "batch": {"items": [{"op": "insert", **change}]},
        "create_namespace": {"model": "m"},
        "register_worker": {"worker": "w"},
        "heartbeat": {"workers": [{"worker": "w"}]},
        "clear_worker": {"worker": "w"},
        "purge_tenant": {"tenant": "default"},
    }


async def test_each_wrong_field_has_its_stable_code_on_both_wires(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (_, urls, streams), PlainHttp(urls[0]) as shard, PlainHttp(urls[1]) as router:
        good = await good_requests(router)
        connections = [await PlainStream.connect(address, {"version": 1}) for address in streams]
        for name, fields, code, field in CASES:
            body = good[name] | fields
            change = OPERATIONS[name].change
            errors = []
            for connection in connections:
                well, answer = await connection.ask(name, body)
                assert not well, (name, fields, answer)
                errors.append(answer["error"])
            if "{" not in OPERATIONS[name].path:
                for http in (shard, router):
                    reply = await http.ask("POST", OPERATIONS[name].path, body)
                    assert reply.status == STATUS[code], (name, fields, reply)
                    errors.append(reply.error)
            for error in errors:
                assert (error["code"], error.get("outcome")) == (code, "not_applied" if change else None), (
                    fields,
                    error,
                )
                assert error["field"] in field.split("|"), (name, fields, error)
        for connection in connections:
            assert (await connection.ask("match", good["match"]))[0], "the connection goes on"
            connection.close()


async def test_parts_that_only_a_router_gives_are_checked_by_the_shard(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (_, urls, streams), PlainHttp(urls[1]) as router:
        insert = (await good_requests(router))["insert"]
        shard = await PlainStream.connect(streams[0], {"version": 1})
        for part, code in (
            ({"position": 64, "block_ids": IDS}, "wrong_shard"),
            ({"position": 0, "block_ids": b"1234567"}, "bad_request"),
            ({"position": 0, "block_ids": b""}, "bad_request"),
            ({"position": 0, "block_ids": IDS, "first": 3}, "bad_request"),
            ({"position": 0, "block_ids": IDS, "last": 4}, "bad_request"),
        ):
            well, answer = await shard.ask("insert", insert | {"more": [part]})
            assert (well, answer["error"]["code"]) == (False, code), part
        shard.close()
        router_stream = await PlainStream.connect(streams[1], {"version": 1})
        for fields in ({"more": [{"position": 0, "block_ids": IDS}]}, {"position": 64, "epoch": 1}):
            well, answer = await router_stream.ask("insert", insert | fields)
            assert (well, answer["error"]["code"]) == (False, "bad_request")
            assert answer["error"]["field"] in fields
        router_stream.close()


@settings(max_examples=12)
@given(st.data())
async def test_a_node_answers_whatever_it_is_sent(data: st.DataObject) -> None:
    async with shared_cluster() as (urls, streams, good):
        for _ in range(10):
            name = data.draw(st.sampled_from(sorted(good)))
            body = dict(good[name])
            for field in data.draw(st.lists(st.sampled_from([*body, "first", "last", "seq", "tier"]), max_size=2)):
                body[field] = data.draw(JUNK | st.binary(max_size=40))
            at = data.draw(st.integers(0, 1))
            connection = await PlainStream.connect(streams[at], {"version": 1})
            well, answer = await connection.ask(name, body)
            connection.close()
            assert well or answer["error"]["code"] in STATUS
            assert well or answer["error"]["code"] != "internal", (body, answer)
            raw = data.draw(st.binary(max_size=40))
            media = data.draw(st.sampled_from([MSGPACK, JSON]))
            async with PlainHttp(urls[at]) as http:
                path = OPERATIONS[name].path.replace("{tenant}", "x")
                reply = await http.raw("POST", path, raw, {"Content-Type": media})
                assert reply.status in {200, *STATUS.values()} - {500}
                assert reply.status == 200 or reply.error["code"] in STATUS


@asynccontextmanager
async def shared_cluster() -> AsyncIterator[tuple[list[str], list[str], dict[str, dict[str, Any]]]]:
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        async with nodes(Path(directory)) as (_, urls, streams), PlainHttp(urls[1]) as http:
            yield urls, streams, await good_requests(http)
