"""Connections: who is slow, idle, one too many or speaks nonsense is answered where it can be, and dropped."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sarp_cluster import limits
from sarp_cluster.client import AsyncClient, RefusedError, UnreachableError
from sarp_cluster.wire import http_server, stream_server
from sarp_cluster.wire.http_server import HttpServer
from sarp_cluster.wire.stream_server import StreamServer
from tests.local_cluster import Coordinator, LocalCluster, until
from tests.wire.plain_clients import JSON, MSGPACK, PlainHttp, PlainStream

TLS = Path(__file__).parent / "tls"
HEAD = b"POST /v1/shards/s/drain HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def node(tmp_path: Path) -> Coordinator:
    """A service that does enough: it answers `events` and `cluster`, and needs no disk."""
    cluster = LocalCluster(tmp_path, ["s0"], {})
    node = cluster.coordinator
    node.authenticator.open = True
    return node


@asynccontextmanager
async def stream_of(node: Coordinator, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[StreamServer, str]]:
    server = await StreamServer.start(node, "127.0.0.1", 0, tls=tls)
    try:
        yield server, f"127.0.0.1:{server.address[1]}"
    finally:
        await server.close()


@asynccontextmanager
async def http_of(node: Coordinator, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, int]]:
    server = await HttpServer.start(node, "127.0.0.1", 0, tls=tls)
    try:
        yield "127.0.0.1", server.address[1]
    finally:
        await server.close(0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time limit is short."""
    for name in ("HEADER_TIMEOUT_MS", "BODY_TIMEOUT_MS", "IDLE_TIMEOUT_MS", "STREAM_IDLE_TIMEOUT_MS"):
        monkeypatch.setattr(limits, name, 80)
    monkeypatch.setattr(http_server, "SWEEP_S", 0.02)
    monkeypatch.setattr(stream_server, "LOOK_S", 0.02)


async def dribble(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One byte after the other, well within every limit on silence, until the other side has enough."""
    try:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.01)
    except ConnectionError:
        pass


# --- the stream -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon")
async def test_a_stream_that_says_nothing_is_dropped(node: Coordinator) -> None:
    async with stream_of(node) as (server, address):
        silent = await PlainStream.connect(address)
        idle = await PlainStream.connect(address, {"version": 1})
        assert await silent.closed()
        assert await idle.closed()
        await until(lambda: not server.connections)


@pytest.mark.usefixtures("soon")
async def test_a_hello_that_comes_byte_by_byte_is_not_waited_for(node: Coordinator) -> None:
    async with stream_of(node) as (_, address):
        slow = await PlainStream.connect(address)
        task = asyncio.create_task(dribble(slow.writer, (1_000).to_bytes(4, "little") + bytes(1_000)))
        assert await slow.closed()
        task.cancel()


@pytest.mark.usefixtures("soon")
async def test_a_frame_that_comes_byte_by_byte_is_not_waited_for(node: Coordinator) -> None:
    async with stream_of(node) as (_, address):
        slow = await PlainStream.connect(address, {"version": 1})
        slow.send("ping", {})
        task = asyncio.create_task(dribble(slow.writer, (1_000).to_bytes(4, "little") + bytes(1_000)))
        assert (await slow.receive())[1]
        assert await slow.closed()
        task.cancel()


@pytest.mark.usefixtures("soon")
async def test_a_stream_that_talks_is_kept(node: Coordinator) -> None:
    async with stream_of(node) as (_, address):
        stream = await PlainStream.connect(address, {"version": 1})
        loop = asyncio.get_running_loop()
        ends = loop.time() + 0.3
        while loop.time() < ends:
            assert (await stream.ask("ping", {}))[0]
            await asyncio.sleep(0.01)
        stream.close()


async def test_one_stream_too_many_is_closed(node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 2)
    async with stream_of(node) as (server, address):
        kept = [await PlainStream.connect(address, {"version": 1}) for _ in range(2)]
        extra = await PlainStream.connect(address)
        assert await extra.closed()
        assert (await kept[0].ask("ping", {}))[0]
        kept[0].close()
        await until(lambda: len(server.connections) == 1)
        again = await PlainStream.connect(address, {"version": 1})
        again.close()
        kept[1].close()


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "bad_request"),
        (b"\xc1", "bad_request"),
        (b"\x93\x01\xa4ping", "bad_request"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad_request"),
    ],
)
async def test_nonsense_on_a_stream_is_answered_and_closed(node: Coordinator, payload: bytes, code: str) -> None:
    async with stream_of(node) as (_, address):
        for hello in (None, {"version": 1}):
            stream = await PlainStream.connect(address, hello)
            stream.send_payload(payload)
            _, well, body = await stream.receive()
            assert (well, body["error"]["code"], body["error"]["field"]) == (False, code, "frame")
            assert await stream.closed()
            stream.close()


async def test_a_frame_over_the_limit_is_answered_and_closed(node: Coordinator) -> None:
    async with stream_of(node) as (_, address):
        stream = await PlainStream.connect(address, {"version": 1})
        stream.writer.write((2**32 - 1).to_bytes(4, "little"))
        _, well, body = await stream.receive()
        assert (well, body["error"]["code"], body["error"]["field"]) == (False, "too_large", "frame")
        assert await stream.closed()
        stream.close()


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        ({}, "version"),
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"version": 1, "cluster": "another"}, "cluster"),
        ({"version": 1, "unheard_of": 1}, "unheard_of"),
        ({"version": 1, "credential": "x" * 256}, "credential"),
    ],
)
async def test_a_wrong_hello_is_answered_and_closed(node: Coordinator, hello: dict[str, Any], field: str) -> None:
    async with stream_of(node) as (_, address):
        stream = await PlainStream.connect(address)
        well, body = await stream.ask("hello", hello)
        assert (well, body["error"]["code"], body["error"]["field"]) == (False, "bad_request", field)
        assert await stream.closed()
        stream.close()


async def test_operations_that_are_not_there_are_refused_and_the_stream_goes_on(node: Coordinator) -> None:
    async with stream_of(node) as (_, address):
        stream = await PlainStream.connect(address, {"version": 1})
        for name in ("nothing", "", "match", "hello", "x" * 10_000):
            well, body = await stream.ask(name, {})
            assert (well, body["error"]["code"], body["error"]["field"]) == (False, "bad_request", "operation")
        assert (await stream.ask("events", {"after": 3}))[0]
        stream.close()


async def test_who_does_not_take_its_answers_is_dropped(node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEND_BUFFER_BYTES_MAX", 20_000)
    async with stream_of(node) as (server, address):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        stream = PlainStream(reader, writer)
        stream.send("hello", {"version": 1})
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: not server.connections, lambda: [stream.send("events", {}) for _ in range(200)])
        stream.close()


async def test_a_connection_with_many_requests_is_read_no_further(
    node: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUESTS_A_CONNECTION_MAX", 3)
    go_on, begun = asyncio.Event(), 0

    async def slow(*asked: Any) -> Any:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return await real(*asked)

    real = node.events
    monkeypatch.setattr(node, "events", slow)
    async with stream_of(node) as (_, address):
        stream = await PlainStream.connect(address, {"version": 1})
        numbers = {stream.send("events", {}) for _ in range(10)}
        await until(lambda: begun == 3)
        assert begun == 3
        go_on.set()
        assert {(await stream.receive())[0] for _ in numbers} == numbers
        stream.close()


# --- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "begin", [b"", b"GET /v1/events HTTP/1.1\r\nHost: x\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_an_http_connection_that_says_nothing_more_is_dropped(node: Coordinator, begin: bytes) -> None:
    async with http_of(node) as place:
        reader, writer = await asyncio.open_connection(*place)
        writer.write(begin)
        await reader.read()  # to its end
        writer.transport.abort()


@pytest.mark.usefixtures("soon")
async def test_a_head_that_comes_byte_by_byte_is_not_waited_for(node: Coordinator) -> None:
    async with http_of(node) as place:
        reader, writer = await asyncio.open_connection(*place)
        task = asyncio.create_task(dribble(writer, b"GET /v1/events HTTP/1.1\r\n" + b"X-A: b\r\n" * 1_000))
        assert await reader.read() == b""
        task.cancel()
        writer.transport.abort()


@pytest.mark.usefixtures("soon")
async def test_a_body_that_comes_byte_by_byte_is_not_waited_for(node: Coordinator) -> None:
    async with http_of(node) as place:
        reader, writer = await asyncio.open_connection(*place)
        writer.write(HEAD % 1_000)
        task = asyncio.create_task(dribble(writer, bytes(1_000)))
        answer = await reader.read()
        assert b" 400 " in answer.splitlines()[0]
        assert b'"field":"body"' in answer
        task.cancel()
        writer.transport.abort()


async def test_one_http_connection_too_many_is_closed(node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 2)
    async with http_of(node) as place:
        kept = [await asyncio.open_connection(*place) for _ in range(2)]
        for _, writer in kept:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader, _ in kept:
            assert b" 200 " in await reader.readline()
        reader, writer = await asyncio.open_connection(*place)
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        writer.transport.abort()
        for _, one in kept:
            one.transport.abort()


async def test_bodies_over_the_limit_are_refused_before_they_are_read(
    node: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http_of(node) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD % (limits.BODY_BYTES_MAX + 1))
        answer = await reader.read()
        assert b" 413 " in answer.splitlines()[0]
        assert b'"code":"too_large"' in answer
        writer.transport.abort()
        # In pieces, without a length that could be looked at.
        monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 1_000)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield bytes(100)

        async with PlainHttp(f"http://{host}:{port}") as http:
            try:
                reply = await http.raw("POST", "/v1/shards/s/drain", pieces(), {"Content-Type": JSON})
            except aiohttp.ClientError:
                pass  # closed while it was still sending
            else:
                assert (reply.status, reply.error["code"]) == (413, "too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
async def test_packed_bodies_are_refused_unread(node: Coordinator, encoding: str) -> None:
    async with http_of(node) as (host, port), PlainHttp(f"http://{host}:{port}") as http:
        headers = {"Content-Type": JSON, "Content-Encoding": encoding}
        reply = await http.raw("POST", "/v1/shards/s/drain", b"\x1f\x8b\x08\x00", headers)
        assert (reply.status, reply.error["code"], reply.error["field"]) == (
            415,
            "unsupported_media",
            "Content-Encoding",
        )


async def test_what_http_asks_for_in_vain_has_a_stable_code(node: Coordinator) -> None:
    async with http_of(node) as (host, port), PlainHttp(f"http://{host}:{port}") as http:
        for method, path, media, status, code in (
            ("GET", "/v1/nothing", JSON, 404, "not_found"),
            ("GET", "/v1/match", JSON, 404, "not_found"),
            ("POST", "/v1/events", JSON, 405, "method_not_allowed"),
            ("DELETE", "/v1/cluster", MSGPACK, 405, "method_not_allowed"),
            ("GET", "/v1/shards/s/drain", JSON, 405, "method_not_allowed"),
            ("POST", "/v1/shards/a/b/drain", JSON, 404, "not_found"),
            ("POST", "/v1/shards//drain", JSON, 404, "not_found"),
            ("GET", "/v1/events?after=x", JSON, 400, "bad_request"),
            ("GET", "/v1/events?after=" + "9" * 5_000, JSON, 400, "bad_request"),
            ("GET", "/v1/events?after=99999999999999999999", JSON, 400, "bad_request"),
            ("GET", "/v1/events?after=-1", JSON, 400, "bad_request"),
            ("GET", "/v1/events?unheard_of=1", JSON, 400, "bad_request"),
            ("POST", "/v1/shards/" + "s" * 256 + "/drain", JSON, 400, "bad_request"),
        ):
            reply = await http.ask(method, path, media=media)
            assert (reply.status, reply.error["code"]) == (status, code), (method, path, reply)
        reply = await http.raw("POST", "/v1/shards/s/drain", b"<a/>", {"Content-Type": "text/xml"})
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media")
        reply = await http.ask("GET", "/v1/events?after=3&limit=1")
        assert [event["number"] for event in reply.body["events"]] == [4]
        for body in (b"{}", b"\x80"):
            reply = await http.raw("GET", "/v1/events", body, {"Content-Type": JSON})
            assert (reply.status, reply.error["field"]) == (400, "body")


async def test_a_head_over_the_limit_is_refused(node: Coordinator) -> None:
    async with http_of(node) as (host, port), PlainHttp(f"http://{host}:{port}") as http:
        reply = await http.raw("GET", "/v1/events", None, {"X-Long": "x" * (limits.HEADER_BYTES_MAX + 1)})
        assert reply.status == 400


# --- TLS --------------------------------------------------------------------------------------------------------------


def served() -> ssl.SSLContext:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    return tls


@pytest.mark.usefixtures("soon")
async def test_who_does_not_shake_hands_is_dropped(node: Coordinator) -> None:
    async with http_of(node, served()) as place, stream_of(node, served()) as (_, address):
        for host, port in (place, address.split(":")):
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b""
            writer.transport.abort()


async def test_http_is_served_with_tls(node: Coordinator) -> None:
    trusting = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
    async with http_of(node, served()) as (_, port):
        async with PlainHttp(f"https://127.0.0.1:{port}", tls=trusting) as http:
            assert (await http.ask("GET", "/v1/events")).status == 200
        async with AsyncClient(f"https://127.0.0.1:{port}", tls=trusting) as client:
            assert len(await client.events()) == 5
        async with stream_of(node, served()) as (_, address), AsyncClient(f"sarps://{address}", tls=trusting) as client:
            assert len(await client.events()) == 5
        for url in (f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}"):
            async with AsyncClient(url) as distrustful:
                with pytest.raises((UnreachableError, RefusedError)):
                    await distrustful.events()
