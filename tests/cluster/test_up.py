"""A whole cluster of processes on this machine: it is all there, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from sarp_cluster.up import LocalCluster, Ports, running
from tests.cluster.coordinator_process import alive


async def pid_of(cluster: LocalCluster) -> int:
    pid = await asyncio.to_thread(cluster.shard_pid, "shard-0")
    assert pid is not None
    return pid


async def test_it_serves_and_ends_with_all_its_processes(tmp_path: Path) -> None:
    cluster = LocalCluster(directory=tmp_path, ports=Ports.free(1, 2))
    async with running(cluster), aiohttp.ClientSession() as session:
        pids = [cluster.pid(name) for name in ("coordinator", "router-0", "router-1")] + [await pid_of(cluster)]
        for url in cluster.router_urls:
            async with session.get(f"{url}/v1/slots") as response:
                assert (await response.json())["shards"] == ["shard-0"]
    assert all(pid is not None and not alive(pid) for pid in pids)


async def test_no_shard_is_left_when_its_coordinator_was_just_away(tmp_path: Path) -> None:
    cluster = LocalCluster(directory=tmp_path, ports=Ports.free(1, 1))
    async with running(cluster):
        shard, coordinator = await pid_of(cluster), cluster.pid("coordinator")
        assert coordinator is not None
        os.kill(coordinator, signal.SIGKILL)
    assert not alive(shard)


async def test_one_that_cannot_be_started_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    cluster = LocalCluster(directory=tmp_path / "a file", ports=Ports.free(1, 1))
    with pytest.raises(FileExistsError):
        async with asyncio.timeout(10), running(cluster):
            pytest.fail("it runs")
