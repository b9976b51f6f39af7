"""Whole clusters, simulated from seeds: kills, pauses, cuts and late messages, and no answer is ever wrong.

A failure prints its seed: SARP_SIMULATION_SEEDS=17 repeats it, SARP_SIMULATION_SEEDS=0-999 tries a thousand.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from blockbuster import BlockBuster

from sarp_cluster.cluster.placement import slot_of
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.testing.simulated_loop import SimulatedLoop
from sarp_cluster.types import HashProfile, NamespaceSpec
from tests.cluster.simulated_cluster import SECRET, Nemesis, SimulatedCluster
from tests.cluster.simulated_load import Load

SECONDS = 30.0
SPEC = NamespaceSpec(tenant="default", model="m", hash_profile=HashProfile.OPAQUE)


def seeds() -> list[int]:
    text = os.environ.get("SARP_SIMULATION_SEEDS", "0-11")
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def splits_of(load: Load) -> dict[int, int]:
    """Cut the longest sequences, one of them twice."""
    key = NamespaceKey(derive_namespace_key(SECRET, SPEC))
    found: dict[int, int] = {}
    for sequence in sorted(load.sequences, key=len)[-3:]:
        for start, cut in ((0, 64), (64, 128)):
            if cut < len(sequence):
                found[key.internal_id(sequence[start].to_bytes(8, "little"), 0)] = cut
    assert all(0 <= slot_of(block) < 4096 for block in found)
    return found


async def simulate(loop: SimulatedLoop, directory: Path, seed: int) -> tuple[Load, Nemesis]:
    cluster = SimulatedCluster(loop, directory, splits={})
    load = Load(cluster, loop, seed)
    cluster.splits = splits_of(load)
    nemesis = Nemesis(cluster, seed)
    try:
        cluster.start_all()
        async with asyncio.timeout(30):
            await load.prepare()
        async with asyncio.TaskGroup() as group:
            for worker in load.held:
                group.create_task(load.work(worker))
            for _ in range(2):
                group.create_task(load.look())
            await nemesis.run(SECONDS)
            load.stop = True
        async with asyncio.timeout(60):
            while not all(cluster.ready(name) for name in cluster.names):
                await asyncio.sleep(0.1)
        assert not cluster.failures, cluster.failures
        for sequence in load.sequences:
            for router in cluster.routers:
                async with asyncio.timeout(30):
                    while (answer := await load.match(sequence, router)) is None or not answer.complete:
                        await asyncio.sleep(0.1)
        for name in cluster.shards:
            await cluster.services[name].life.index.validate()
    except BaseException:
        sys.stdout.write("\n".join([*nemesis.story, *cluster.failures, ""]))
        raise
    finally:
        await cluster.end()
    return load, nemesis


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.timeout(120)
def test_no_answer_is_wrong_whatever_happens(seed: int, tmp_path: Path, blockbuster: BlockBuster) -> None:
    sys.stdout.write(f"again: SARP_SIMULATION_SEEDS={seed} pytest tests/cluster/test_simulation.py\n")
    blockbuster.deactivate()  # the loop is not real: helper threads' work is done in it
    loop = SimulatedLoop(seed)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        load, nemesis = runner.run(simulate(loop, tmp_path, seed))
    assert load.matches > 100
    assert load.complete > 50
    assert load.changes > 30
    assert len(nemesis.story) > 5
