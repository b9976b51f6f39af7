"""Everything between nodes and callers with TLS, and only for those who are known."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sarp_cluster.client import AsyncClient, RefusedError, UnreachableError
from sarp_cluster.wire.auth import Credential, digest, make_token
from tests.cluster.services import Services, services

TLS = Path(__file__).parent.parent / "wire" / "tls"
TOKEN = make_token()


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "certificate.pem"))


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Services]:
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    known = Credential(name="engines", sha256=digest(TOKEN), tenants=["acme"], scopes=["match", "insert"])
    async with services(tmp_path, credentials=[known], tls=served, peer_tls=trusting()) as one:
        yield one


async def test_a_cluster_with_tls_serves_who_is_known(secured: Services) -> None:
    (http, stream) = secured.ports.routers[0]
    for url, direct in (
        (f"https://127.0.0.1:{http}", False),
        (f"sarps://127.0.0.1:{stream}", False),
        (f"sarps://127.0.0.1:{stream}", True),
    ):
        async with AsyncClient(url, credential=TOKEN, tls=trusting(), direct=direct) as client:
            namespace = await client.namespace("m")
            await client.register_worker("w")
            for root in range(20):
                ids = [root * 100 + number for number in range(1, 9)]
                await client.insert(namespace, worker="w", block_ids=ids)
                answer = await client.match(namespace, block_ids=[*ids, 5], deadline_ms=2_000)
                assert (answer.matched_blocks, answer.complete) == (8, True)


async def test_who_is_not_known_or_does_not_trust_gets_nothing(secured: Services) -> None:
    (http, stream) = secured.ports.routers[0]
    for url in (f"https://127.0.0.1:{http}", f"sarps://127.0.0.1:{stream}"):
        async with AsyncClient(url, credential=make_token(), tls=trusting()) as unknown:
            with pytest.raises((RefusedError, UnreachableError)):
                await unknown.namespace("m")
        async with AsyncClient(url, credential=TOKEN) as distrustful:
            with pytest.raises(UnreachableError):
                await distrustful.namespace("m")
    for plain in (f"http://127.0.0.1:{http}", f"sarp://127.0.0.1:{stream}"):
        async with AsyncClient(plain, credential=TOKEN) as careless:
            with pytest.raises((RefusedError, UnreachableError)):
                await careless.namespace("m")
    async with AsyncClient(f"https://127.0.0.1:{http}", credential=TOKEN, tls=trusting()) as client:
        with pytest.raises(RefusedError) as refused:
            await client.cluster()
        assert refused.value.code == "forbidden"
        with pytest.raises(RefusedError) as refused:
            await client.purge_tenant("acme")
        assert refused.value.code == "forbidden"


async def test_nothing_hangs_on_a_connection_that_says_nothing(secured: Services) -> None:
    """A TLS handshake that never comes is given up by its own time limit; others are served meanwhile."""
    _, writer = await asyncio.open_connection("127.0.0.1", secured.ports.routers[0][1])
    async with AsyncClient(
        f"sarps://127.0.0.1:{secured.ports.routers[0][1]}", credential=TOKEN, tls=trusting()
    ) as client:
        assert (await client.namespace("m")).block_size == 16
    writer.close()
