"""Who may do what: default-deny on both wires, scopes, tenants, owners; and nobody learns what is not theirs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire.auth import Authenticator, Credential, digest, make_token, read_credentials
from sarp_cluster.wire.codec import JSON, encode
from sarp_cluster.wire.operations import OPERATIONS
from tests.local_cluster import LocalCluster, credential, local_cluster, token_of
from tests.wire.plain_clients import PlainHttp, PlainStream

OPEN_PATHS = ["/healthz", "/readyz", "/metrics", "/"]
CREDENTIALS = [
    credential("reader", "match"),
    credential("writer", "match", "insert"),
    credential("other writer", "match", "insert"),
    credential("admin", "admin"),
    credential("foreign", "match", "insert", "admin", tenants=["foreign"]),
    credential("both", "match", "insert", "admin", tenants=["default", "foreign"]),
]
BODIES: dict[str, dict[str, Any]] = {
    "match": {"namespace": "n", "block_ids": bytes(8)},
    "insert": {"namespace": "n", "block_ids": bytes(8), "worker": "w"},
    "remove": {"namespace": "n", "block_ids": bytes(8), "worker": "w"},
    "batch": {"items": [{"op": "match", "namespace": "n", "block_ids": bytes(8)}]},
    "create_namespace": {"model": "m"},
    "register_worker": {"worker": "w"},
    "heartbeat": {"workers": [{"worker": "w"}]},
    "clear_worker": {"worker": "w"},
    "drain_worker": {"worker": "w"},
    "deregister_worker": {"worker": "w"},
    "purge_tenant": {"tenant": "default"},
    "snapshot_shard": {"shard": "s0"},
    "recover_shard": {"shard": "s0"},
    "drain_shard": {"shard": "s0"},
}


@asynccontextmanager
async def guarded(directory: Path) -> AsyncIterator[tuple[LocalCluster, list[str], list[str]]]:
    async with local_cluster(directory, credentials=CREDENTIALS) as cluster:
        shard, router = cluster.shards["s0"], cluster.routers[0]
        urls = [f"http://{shard.life.http_address}", f"http://{router.http_address}"]
        yield cluster, urls, [shard.life.stream_address, router.stream_address]


def hello(name: str, tenant: str = "") -> dict[str, Any]:
    return {"version": 1, "credential": token_of(name), "tenant": tenant}


async def test_without_a_credential_every_path_is_closed_also_those_that_are_not_there(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, urls, streams):
        for url in urls:
            paths = {re.sub("{.*}", "s0", one.path) for one in OPERATIONS.values() if one.path}
            for token in ("", "wrong"):
                async with PlainHttp(url, token) as http:
                    for path in [*paths, "/v1/nothing", "/nothing", "/v1/../v1/slots", "/metrics/", "/favicon.ico"]:
                        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
                            reply = await http.ask(method, path)
                            assert reply.status == 401, (method, path, reply)
                            assert reply.error["code"] == "unauthenticated"
                            assert reply.headers["WWW-Authenticate"] == "Bearer"
                    for path in OPEN_PATHS:
                        assert (await http.ask("GET", path)).status == 200
                        assert (await http.ask("POST", path)).status == 401
                    basic = await http.raw("GET", "/v1/slots", None, {"Authorization": "Basic dTpw"})
                    assert basic.status == 401
        for address in streams:
            for first, body in (("hello", {"version": 1}), ("hello", hello("nobody")), ("match", BODIES["match"])):
                stream = await PlainStream.connect(address)
                well, reply = await stream.ask(first, body)
                assert not well
                assert reply["error"]["code"] == ("unauthenticated" if first == "hello" else "bad_request")
                assert await stream.closed()
                stream.close()


async def test_each_operation_needs_its_scope_on_both_wires(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, urls, streams):
        for name, scopes in (("reader", {"match"}), ("writer", {"match", "insert"}), ("admin", {"admin"})):
            connections = [await PlainStream.connect(address, hello(name)) for address in streams]
            async with PlainHttp(urls[0], token_of(name)) as shard, PlainHttp(urls[1], token_of(name)) as router:
                for operation in OPERATIONS.values():
                    if operation.scope in scopes or operation.scope is None or operation.name == "drain_shard":
                        continue
                    body = BODIES.get(operation.name, {})
                    answers = [await connection.ask(operation.name, body) for connection in connections]
                    codes = {answer["error"]["code"] for _, answer in answers}
                    # What a node does not do it does not know.
                    assert codes <= {"forbidden", "bad_request"}, (name, operation.name, answers)
                    if operation.path:
                        path = operation.path.replace("{tenant}", "default").replace("{shard}", "s0")
                        sent = body if operation.method == "POST" and "{" not in operation.path else None
                        for http in (shard, router):
                            reply = await http.ask(operation.method, path, sent)
                            assert reply.status in (403, 404), (name, operation.name, reply)
                    else:
                        assert "forbidden" in codes or codes == {"bad_request"}
                batch = {"items": [BODIES["match"] | {"op": "match"}, BODIES["insert"] | {"op": "insert"}]}
                for connection in connections:
                    well, reply = await connection.ask("batch", batch)
                    assert well
                    assert [one["error"]["code"] for one in reply["results"]] == [
                        "unknown_namespace" if "match" in scopes else "forbidden",
                        "unknown_namespace" if "insert" in scopes else "forbidden",
                    ]
            for connection in connections:
                connection.close()


async def test_a_node_scope_is_given_to_no_operation_of_the_http_wire() -> None:
    assert not [one.name for one in OPERATIONS.values() if one.scope == "node" and one.path]


async def test_a_namespace_of_another_tenant_looks_as_if_it_were_not_there(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, urls, streams):
        for url, address in zip(urls, streams, strict=True):
            async with PlainHttp(urls[1], token_of("writer")) as mine, PlainHttp(url, token_of("foreign")) as theirs:
                namespace = (await mine.ask("POST", "/v1/namespaces", {"model": "m"})).body["namespace"]
                await theirs.ask("POST", "/v1/workers/register", {"worker": "foreign"})
                for operation in ("match", "insert", "remove"):
                    replies = []
                    for name in (namespace, namespace[::-1], "0" * 32):
                        body = BODIES[operation] | {"namespace": name, "epoch": 1}
                        replies.append(await theirs.ask("POST", f"/v1/{operation}", body))
                    texts = {(reply.status, str(reply.body)) for reply in replies}
                    assert len(texts) == 1
                    assert replies[0].error["code"] == "unknown_namespace"
                stream = await PlainStream.connect(address, hello("foreign"))
                answers = [
                    await stream.ask("match", BODIES["match"] | {"namespace": one}) for one in (namespace, "0" * 32)
                ]
                assert answers[0] == answers[1]
                stream.close()
                listed = await theirs.ask("GET", "/v1/namespaces")
                assert namespace not in str(listed.body)
                same = await theirs.ask("POST", "/v1/namespaces", {"model": "m"})
                assert same.body["namespace"] != namespace
                assert same.body["key"] != (await mine.ask("GET", "/v1/namespaces")).body["namespaces"][0]["key"]


async def test_a_credential_of_several_tenants_says_which_it_means(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, urls, streams):
        made = set()
        for url, address in zip(urls, streams, strict=True):
            async with PlainHttp(url, token_of("both")) as http:
                reply = await http.ask("GET", "/v1/namespaces")
                assert (reply.status, reply.error["field"]) == (400, "Sarp-Tenant")
                reply = await http.ask("GET", "/v1/namespaces", headers={"Sarp-Tenant": "third"})
                assert (reply.status, reply.error["code"]) == (403, "forbidden")
                for tenant in ("default", "foreign"):
                    reply = await http.ask("POST", "/v1/namespaces", {"model": "m"}, headers={"Sarp-Tenant": tenant})
                    made.add(reply.body["namespace"])
                reply = await http.ask("POST", "/v1/namespaces", {"model": "m", "tenant": "default"})
                assert (reply.status, reply.error["field"]) == (400, "tenant"), "never in the body"
            stream = await PlainStream.connect(address, hello("both", "foreign"))
            well, reply = await stream.ask("list_namespaces", {})
            assert well
            assert {one["namespace"] for one in reply["namespaces"]} < made
            stream.close()
            stream = await PlainStream.connect(address)
            well, reply = await stream.ask("hello", hello("both", "third"))
            assert (well, reply["error"]["code"]) == (False, "forbidden")
            stream.close()
        assert len(made) == 2


async def test_a_worker_belongs_to_the_credential_that_registered_it(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, urls, _):
        for url in urls:
            async with PlainHttp(url, token_of("writer")) as owner, PlainHttp(url, token_of("other writer")) as other:
                namespace = (await owner.ask("POST", "/v1/namespaces", {"model": "m"})).body["namespace"]
                assert (await owner.ask("POST", "/v1/workers/register", {"worker": "w"})).status == 200
                change = {"namespace": namespace, "worker": "w", "block_ids": bytes(8)}
                for path, body in (
                    ("/v1/insert", change),
                    ("/v1/remove", change),
                    ("/v1/workers/register", {"worker": "w"}),
                    ("/v1/workers/heartbeat", {"workers": [{"worker": "w"}]}),
                    ("/v1/workers/clear", {"worker": "w"}),
                    ("/v1/workers/drain", {"worker": "w"}),
                    ("/v1/workers/deregister", {"worker": "w"}),
                ):
                    reply = await other.ask("POST", path, body)
                    assert (reply.status, reply.error["code"], reply.error["field"]) == (403, "forbidden", "worker")
                assert (await other.ask("GET", "/v1/workers")).body["workers"] == []
                assert (await owner.ask("POST", "/v1/insert", change)).status == 200
            async with PlainHttp(url, token_of("admin")) as admin:
                # What an admin may is told by its scopes, and matching is none of them.
                assert (await admin.ask("GET", "/v1/workers")).status == 403


async def test_a_tenant_is_purged_by_its_own_admins_alone(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, urls, _), PlainHttp(urls[1], token_of("foreign")) as foreign:
        reply = await foreign.ask("POST", "/v1/tenants/default/purge")
        assert (reply.status, reply.error["field"]) == (403, "tenant")
        assert (await foreign.ask("POST", "/v1/tenants/foreign/purge")).body == {"tenant": "foreign", "purges": 1}


def test_tokens_are_long_and_kept_as_digests_only() -> None:
    token = make_token()
    assert token != make_token()
    assert len(token) > 40
    kept = Credential(name="a", sha256=digest(token), scopes=["match"])
    assert token not in str(kept)
    authenticator = Authenticator([kept])
    assert not authenticator.open
    assert authenticator.authenticate(token).name == "a"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sha256": "0" * 63}, "sha256"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes"),
        ({"tenants": []}, "tenants"),
        ({"tenants": ["é" * 200]}, "name"),
        ({"password": "x"}, "password"),
        ({"name": ""}, "name"),
    ],
)
def test_a_credentials_file_is_checked_field_by_field(change: dict[str, Any], field: str) -> None:
    good = {"name": "a", "sha256": "0" * 64, "scopes": ["match"]}
    assert read_credentials(encode({"credentials": [good]}, JSON))[0].tenants == ["default"]
    with pytest.raises(BadRequestError) as caught:
        read_credentials(encode({"credentials": [good | change]}, JSON))
    assert field in str(caught.value.field)
    with pytest.raises(BadRequestError):
        read_credentials(encode({"credentials": [good, good]}, JSON))
