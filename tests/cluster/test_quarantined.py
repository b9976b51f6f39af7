"""A match that meets a damaged segment is shorter, and says so (design §7)."""

from __future__ import annotations

from pathlib import Path

from sarp_cluster.client import AsyncClient
from tests.cluster.services import services


def spoil(store: Path) -> None:
    """Flip a byte of every block ID column there is, behind the first records."""
    for path in store.glob("*.sarp"):
        data = bytearray(path.read_bytes())
        for offset in range(len(data) // 2, len(data), 64):
            data[offset] ^= 0xFF
        path.write_bytes(data)


async def test_a_match_cut_by_damage_is_not_complete_and_an_insert_heals_it(tmp_path: Path) -> None:
    async with (
        services(tmp_path, shards=1) as one,
        AsyncClient(f"http://127.0.0.1:{one.ports.routers[0][0]}") as client,
    ):
        namespace = await client.namespace("m", hash_profile="opaque")
        await client.register_worker("w")
        ids = list(range(1, 600))
        await client.insert(namespace, worker="w", block_ids=ids)
        answer = await client.match(namespace, block_ids=ids, deadline_ms=2_000)
        assert (answer.matched_blocks, answer.complete, answer.degraded) == (599, True, [])
        spoil(tmp_path / "shard-0" / "index")
        answer = await client.match(namespace, block_ids=ids, deadline_ms=2_000)
        assert answer.matched_blocks < 599
        assert (answer.complete, answer.degraded) == (False, ["quarantined"])
        await client.insert(namespace, worker="w", block_ids=ids)
        answer = await client.match(namespace, block_ids=ids, deadline_ms=2_000)
        assert (answer.matched_blocks, answer.complete, answer.degraded) == (599, True, [])
