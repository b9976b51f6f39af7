"""Where the Redis of a cluster's coordinators is, and a client of it (docs/operations.md).

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]                          rediss://…  with TLS
    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT],…/SERVICE[/DB]       rediss+sentinel://…
    unix://[USER[:PASSWORD]@]/PATH                                      a socket of this machine

For TLS, behind a `?`: `ca=FILE` (who signs the server's certificate), `certificate=FILE` and `key=FILE` (ours).
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from redis.asyncio import Redis, Sentinel, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
TIMEOUT_S: Final = limits.MEMBERSHIP_TIMEOUT_MS / 1000
SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
TLS_FILES: Final = {"ca": "ssl_ca_certs", "certificate": "ssl_certfile", "key": "ssl_keyfile"}


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What a URL says."""

    hosts: tuple[tuple[str, int], ...] = ()
    """Of the server, or of the sentinels."""
    service: str = ""
    """Name of the master that sentinels are asked for; empty: there are none."""
    socket: str = ""
    """Path of a Unix socket in place of a host."""
    database: int = 0
    user: str | None = None
    password: str | None = None
    tls: bool = False
    tls_files: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """Without the password."""
        return f"RedisAddress({self})"

    def __str__(self) -> str:
        """For logs: without user and password."""
        if self.socket:
            return f"unix://{self.socket}"
        kind = ("rediss" if self.tls else "redis") + ("+sentinel" if self.service else "")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{kind}://{hosts}" + (f"/{self.service}" if self.service else "") + f"/{self.database}"


def parse_redis_url(url: str, password: str | None = None) -> RedisAddress:
    """What a URL says. `password`: of a file, in place of one in the URL. Raises BadRequestError."""
    try:
        return _parsed(url, password)
    except ValueError as error:
        raise BadRequestError(f"--redis: {error}", field="redis") from error


def _parsed(url: str, password: str | None) -> RedisAddress:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{parts.scheme!r} is none of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    credentials, _, places = parts.netloc.rpartition("@")
    user, _, inline = credentials.partition(":")
    files = []
    for name, value in parse_qsl(parts.query, strict_parsing=bool(parts.query)):
        if name not in TLS_FILES or not parts.scheme.startswith("rediss"):
            raise ValueError(f"{name!r} is not an option of {parts.scheme}://")
        files.append((name, value))
    common: dict[str, Any] = {
        "user": unquote(user) or None,
        "password": password or unquote(inline) or None,
        "tls": parts.scheme.startswith("rediss"),
        "tls_files": tuple(files),
    }
    path = [unquote(part) for part in parts.path.split("/")[1:] if part]
    if parts.scheme == "unix":
        if places or not path:
            raise ValueError("a Unix socket is unix:///PATH")
        return RedisAddress(socket=unquote(parts.path), **common)
    sentinel = parts.scheme.endswith("+sentinel")
    if sentinel and not path:
        raise ValueError("sentinels are asked for a service: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
    service = path.pop(0) if sentinel else ""
    if len(path) > 1 or not all(part.isascii() and part.isdecimal() for part in path):
        raise ValueError(f"{parts.path!r} is not the number of a database")
    hosts = tuple(_place(place, SENTINEL_PORT if sentinel else PORT) for place in places.split(","))
    if not sentinel and len(hosts) > 1:
        raise ValueError("several hosts are for sentinels only")
    return RedisAddress(hosts=hosts, service=service, database=int(path[0]) if path else 0, **common)


def _place(place: str, usual: int) -> tuple[str, int]:
    host, port = place, ""
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    elif ":" in place:
        host, _, port = place.rpartition(":")
    if not host:
        raise ValueError("a host is missing")
    if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{port!r} is not a port")
    return host, int(port) if port else usual


def connect(address: RedisAddress) -> Redis:
    """A client. It connects when it is used, tries nothing twice, and gives up in time."""
    common: dict[str, Any] = {
        "username": address.user,
        "password": address.password,
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        # Who repeats a command does not know whether the first one was done. We do that ourselves, where it is right.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        # By itself it looks its own version up on the disk, for each connection.
        "driver_info": None,
    }
    if address.socket:
        pool = ConnectionPool(
            connection_class=UnixDomainSocketConnection, path=address.socket, db=address.database, **common
        )
        return Redis.from_pool(pool)
    if address.tls:
        common |= {TLS_FILES[name]: path for name, path in address.tls_files}
    if address.service:
        common |= {"ssl": True} if address.tls else {}
        asking = {key: value for key, value in common.items() if key not in ("username", "password")}
        sentinels: Any = Sentinel(list(address.hosts), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        client: Redis = sentinels.master_for(address.service, redis_class=Redis, db=address.database, **common)
        return client
    host, port = address.hosts[0]
    kind: type[Connection] = SSLConnection if address.tls else Connection
    return Redis.from_pool(ConnectionPool(connection_class=kind, host=host, port=port, db=address.database, **common))
