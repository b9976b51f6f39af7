"""A coordinator's service, over streams to shards that fail as it suits the test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator import control_loop
from coordinator.control_loop import ControlLoop
from sarp_cluster import limits
from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.registry import Registry, TenantEntry, WorkerEntry
from sarp_cluster.errors import MembershipError, StorePoisonedError
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.faults import RemoteError
from sarp_cluster.wire.messages import WorkerName
from sarp_cluster.wire.node import EXIT_POISONED
from tests.cluster.fake_shard import FakeCluster, FakeShard, fake_cluster
from tests.golden.record_files import Memory

REGISTER = control.ChangeRequest(
    change=control.NewWorker(worker=WorkerName(worker="w"), owner="me", heartbeat_ttl_ms=0)
)


async def change(shard: FakeShard, request: control.ChangeRequest = REGISTER) -> control.ChangeReply:
    return decode(await shard.ask("change", request), control.ChangeReply)


async def status(one: FakeCluster) -> messages.ClusterReply:
    return decode(await one.shards[0].ask("cluster", messages.Empty()), messages.ClusterReply)


async def test_shards_join_are_leased_and_given_the_first_map(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.until(lambda: one.service.term is not None)
        first, second = one.shards
        reply = await first.beat()
        assert (reply.lease_ms, reply.epoch, reply.leading) == (limits.LEASE_MS, 0, True)
        with pytest.raises(RemoteError) as refused:
            await first.ask("slots", messages.Empty())
        assert refused.value.code == "recovering"
        await one.settle()
        assert first.view.slot_map == second.view.slot_map
        assert (await second.beat()).epoch == 1
        view = decode(await first.ask("fetch", control.FetchRequest(epoch=0, number=0)), control.View)
        assert view.slot_map is not None
        assert [node.shard for node in view.nodes] == ["s0", "s1"]
        assert view.cluster == one.service.cluster
        told = decode(await first.ask("events", messages.EventsRequest()), messages.EventList)
        assert {"shard_joined", "map_made", "map_published", "shard_serving"} <= {one.kind for one in told.events}
        assert [shard.state for shard in (await status(one)).shards] == ["serving", "serving"]
        assert "sarp_coordinator_leading 1" in one.service.metrics()
        assert "shard s0" in one.service.page()
        assert one.service.ready() is None


async def test_nobody_learns_of_a_map_that_most_shards_lack(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.until(lambda: one.service.term is not None)
        for shard in one.shards:
            shard.refuses = True
            await shard.beat()
        await one.until(lambda: one.term.machine.slot_map is not None)
        one.shards[0].refuses = False
        await one.shards[0].beat()
        await one.until(lambda: one.shards[0].view.epoch == 1)
        assert (await one.shards[0].beat()).epoch == 0
        assert one.service.ready() is not None
        with pytest.raises(RemoteError) as refused:
            await change(one.shards[0])
        assert (refused.value.code, refused.value.body.outcome) == ("recovering", "not_applied")


async def test_a_change_is_answered_when_every_serving_shard_has_it(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        one.shards[1].takes.clear()
        asking = asyncio.create_task(change(one.shards[0]))
        await one.until(lambda: one.shards[0].view.number == 1)
        assert not asking.done()
        one.shards[1].takes.set()
        assert (await asking).entry == WorkerEntry(1, "w", 0, "me")
        assert [shard.view.number for shard in one.shards] == [1, 1]
        assert (await one.shards[0].beat()).number == 1


async def test_a_shard_that_does_not_take_a_change_is_named_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_loop, "CALL_TIMEOUT_S", 0.2)
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        one.shards[1].refuses = True
        with pytest.raises(RemoteError) as refused:
            await change(one.shards[0])
        body = refused.value.body
        assert (body.code, body.missing, body.outcome) == ("incomplete", ["s1"], "partly_applied")
        one.shards[1].refuses = False
        assert (await change(one.shards[0])).entry == WorkerEntry(1, "w", 0, "me")
        assert one.shards[1].view.number == 1


async def test_a_shard_that_is_down_is_waited_for_while_its_lease_may_last(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        one.shards[1].takes.clear()
        asking = asyncio.create_task(change(one.shards[0]))
        await one.until(lambda: one.shards[0].view.number == 1)
        machine = one.term.machine
        shard = machine.shards["s1"]
        shard.heard_at, shard.probes_failed = -1e9, limits.PROBES_FAILED_MAX  # much time has passed
        await one.until(lambda: shard.state == "down")
        assert not asking.done()  # it may be answering somebody whom we do not see
        shard.lease_end = -1e9
        assert (await asking).entry.number == 1
        one.shards[1].takes.set()
        await one.shards[1].beat()
        await one.until(lambda: one.shards[1].view.number == 1)


async def test_what_only_a_shard_knows_is_taken_over_before_anything_is_numbered(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        known = one.shards[0].view.slot_map
        assert known is not None
    async with fake_cluster(tmp_path / "lost") as one:
        for shard in one.shards:
            shard.view.slot_map = known
        one.shards[1].view.registry = Registry([TenantEntry(7, "t", 3)], 9)
        await one.until(lambda: one.service.term is not None)
        await one.shards[0].beat()
        await one.shards[1].beat()
        await one.until(lambda: one.term.view.number == 9 and one.term.settled())
        assert one.term.view.slot_map == known
        assert (await one.shards[0].beat()).number == 9
        await one.until(lambda: one.shards[0].view.number == 9)
        assert (await change(one.shards[0])).entry.number == 10
        assert one.shards[0].view.registry.purges("t") == 3


async def test_a_shard_that_is_refused_learns_why(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, 1) as one:
        await one.settle()
        (shard,) = one.shards
        shard.incarnation = "p2"
        await shard.beat()
        shard.incarnation = "p1"
        with pytest.raises(RemoteError) as refused:
            await shard.beat()
        assert refused.value.code == "unavailable"


async def test_commands_reach_their_shard(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        for name in ("snapshot_shard", "drain_shard"):
            await one.shards[0].ask(name, control.ShardCommand(shard="s1"))
        await one.until(lambda: one.shards[1].commands == ["s1", "s1"])
        assert one.shards[0].commands == []
        with pytest.raises(RemoteError) as refused:
            await one.shards[0].ask("recover_shard", control.ShardCommand(shard="s1"))
        assert refused.value.code == "bad_request"


async def test_a_router_is_told_what_it_needs_and_listed(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        beat = control.RouterHeartbeat(router="r0", http="127.0.0.1:7100", epoch=0, number=0)
        reply = decode(await one.shards[0].ask("router_heartbeat", beat), control.HeartbeatReply)
        assert (reply.lease_ms, reply.epoch, [node.shard for node in reply.nodes]) == (0, 1, ["s0", "s1"])
        assert [router.router for router in (await status(one)).routers] == ["r0"]


class Elected(EmbeddedMembership):
    """Records in memory; who leads is the test's choice."""

    leads: bool | None = True

    async def lead(self, coordinator: str) -> bool:
        if self.leads is None:
            raise MembershipError("nobody answers")
        return self.leads


async def test_one_that_does_not_lead_says_so_and_takes_up_what_there_is_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.app.RENEW_S", 0.005)
    monkeypatch.setattr("coordinator.app.LEAD_S", 0.05)
    elected = await Elected.open(Memory())
    assert isinstance(elected, Elected)

    async def opened() -> Elected:
        return elected

    async with fake_cluster(tmp_path, membership=opened) as one:
        await one.settle()
        await change(one.shards[0])
        before = one.term
        for leads in (False, None):
            elected.leads = leads
            await one.until(lambda: one.service.term is None)
            reply = await one.shards[0].beat()
            assert (reply.leading, reply.lease_ms) == (False, 0)
            for name, message in (("change", REGISTER), ("cluster", messages.Empty())):
                with pytest.raises(RemoteError) as refused:
                    await one.shards[0].ask(name, message)
                assert refused.value.code == "not_leader"
            assert one.service.ready() is not None
            elected.leads = True
            await one.until(lambda: one.service.term is not None)
            term: ControlLoop = one.term
            assert term is not before
            assert term.view.number == 1
            await one.settle()


async def test_a_broken_disk_ends_the_process(tmp_path: Path) -> None:
    class Broken(Memory):
        broken = False

        async def write(self, content: bytes) -> None:
            if self.broken:
                raise StorePoisonedError("a sync failed")
            await super().write(content)

    store = Broken()

    async def opened() -> EmbeddedMembership:
        return await EmbeddedMembership.open(store)

    async with fake_cluster(tmp_path, membership=opened) as one:
        await one.settle()
        store.broken = True
        with pytest.raises(RemoteError) as refused:
            await change(one.shards[0])
        assert refused.value.code in ("poisoned", "internal")
        assert one.running is not None
        assert await one.running == EXIT_POISONED


async def test_it_leads_on_while_nobody_says_who_does_and_its_lease_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.app.RENEW_S", 0.001)
    asked: list[bool | None] = []

    class Silent(Elected):
        async def lead(self, coordinator: str) -> bool:
            asked.append(self.leads)
            return await super().lead(coordinator)

    elected = await Silent.open(Memory())
    assert isinstance(elected, Silent)

    async def opened() -> Silent:
        return elected

    async with fake_cluster(tmp_path, membership=opened) as one:
        await one.settle()
        term = one.term
        elected.leads = None
        await one.until(lambda: asked.count(None) > 5)
        elected.leads = True
        await one.until(lambda: asked[-1])
        assert one.service.term is term


async def test_a_shard_that_is_recovering_is_waited_for(tmp_path: Path) -> None:
    """It may begin to serve before it is heard again."""
    async with fake_cluster(tmp_path) as one:
        await one.settle()
        shard = one.shards[1]
        shard.state = "recovering"
        await shard.beat()
        shard.takes.clear()
        asking = asyncio.create_task(change(one.shards[0]))
        await one.until(lambda: one.shards[0].view.number == 1)
        assert not asking.done()
        shard.takes.set()
        await asking
        assert shard.view.number == 1
