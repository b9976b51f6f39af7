"""URLs of a Redis: what is in them, what is refused, and that each kind reaches a real server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sarp_cluster.cluster.redis_address import RedisAddress, connect, parse_redis_url
from sarp_cluster.cluster.redis_membership import RedisMembership
from sarp_cluster.errors import BadRequestError, MembershipError
from tests.cluster.membership_backends import CLUSTER, SECRET
from tests.cluster.redis_server import PASSWORD, RedisServer, free_port, redis_server
from tests.cluster.test_membership import shard
from tests.wire.test_connections import TLS


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://h", RedisAddress(hosts=(("h", 6379),))),
        ("redis://h:1/2", RedisAddress(hosts=(("h", 1),), database=2)),
        ("redis://u:p%40ss@[::1]:1", RedisAddress(hosts=(("::1", 1),), user="u", password="p@ss")),  # noqa: S106
        ("redis://:p@h", RedisAddress(hosts=(("h", 6379),), password="p")),  # noqa: S106
        (
            "rediss://h?ca=/a&key=/b",
            RedisAddress(hosts=(("h", 6379),), tls=True, tls_files=(("ca", "/a"), ("key", "/b"))),
        ),
        (
            "redis+sentinel://u@a:1,b/main/3",
            RedisAddress(hosts=(("a", 1), ("b", 26379)), service="main", database=3, user="u"),
        ),
        ("rediss+sentinel://a/main", RedisAddress(hosts=(("a", 26379),), service="main", tls=True)),
        ("unix:///run/redis/socket", RedisAddress(socket="/run/redis/socket")),
        ("unix://u:p@/run/s", RedisAddress(socket="/run/s", user="u", password="p")),  # noqa: S106
    ],
)
def test_a_url_says_where_redis_is(url: str, wanted: RedisAddress) -> None:
    assert parse_redis_url(url) == wanted


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "h:1",
            "http://h",
            "redis://",
            "redis://h:port",
            "redis://h:0",
            "redis://h:65536",
            "redis://h/x",
            "redis://h/1/2",
        ),
        *("redis://a,b", "redis://h?ca=/a", "rediss://h?verify=no", "redis+sentinel://h", "unix://h/s", "unix://"),
        "redis://[::1",
    ],
)
def test_other_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(BadRequestError, match="--redis") as refused:
        parse_redis_url(url)
    assert refused.value.field == "redis"


def test_passwords_are_not_shown() -> None:
    address = parse_redis_url("redis://user:hidden@h:1/0")
    assert "hidden" not in f"{address} {address!r} {address!s}"
    assert parse_redis_url("redis://user:hidden@h", "of a file").password == "of a file"  # noqa: S105


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


async def works(url: str) -> None:
    membership = RedisMembership(connect(parse_redis_url(url)), secret=SECRET, cluster=CLUSTER)
    try:
        assert await membership.lead("one")
        await membership.put_shard(shard("a"))
        assert (await membership.load()).shards == {"a": shard("a")}
    finally:
        await membership.close()


@contextmanager
def sentinel(directory: Path, server: RedisServer) -> Iterator[int]:
    """One that watches the server; its port."""
    port = free_port()
    settings = directory / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\nlogfile {directory}/sentinel.log\n"
        f"sentinel monitor main 127.0.0.1 {server.port} 1\nsentinel auth-pass main {PASSWORD}\n"
    )
    command = ["redis-server", str(settings), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def test_sentinels_tell_where_the_server_is(tmp_path: Path, server: RedisServer) -> None:
    with sentinel(tmp_path, server) as port:
        end = time.monotonic() + 20
        while True:
            try:
                # The first one is not there: the next is asked.
                return await works(f"redis+sentinel://:{PASSWORD}@127.0.0.1:{free_port()},127.0.0.1:{port}/main")
            except MembershipError:
                assert time.monotonic() < end


async def test_with_tls_the_server_is_known_by_its_certificate(server: RedisServer) -> None:
    server.kill()
    port = free_port()
    files = ("--tls-cert-file", str(TLS / "certificate.pem"), "--tls-key-file", str(TLS / "key.pem"))
    server.start(
        "--tls-port", str(port), *files, "--tls-ca-cert-file", str(TLS / "certificate.pem"), "--tls-auth-clients", "no"
    )
    await works(f"rediss://:{PASSWORD}@localhost:{port}?ca={TLS / 'certificate.pem'}")
    with pytest.raises(MembershipError, match="cannot be reached"):
        await works(f"rediss://:{PASSWORD}@localhost:{port}")
    assert server.process is not None


async def test_a_socket_of_this_machine_will_do(tmp_path: Path, server: RedisServer) -> None:
    server.kill()
    path = tmp_path / "s"
    server.start("--unixsocket", str(path))
    await works(f"unix://:{PASSWORD}@{path}")
