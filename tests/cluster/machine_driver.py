"""Feeds a state machine with news, executes nothing, and holds each instruction against a model of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from coordinator.instructions import (
    GrantLease,
    Instruction,
    KillShard,
    MakeFirstMap,
    Note,
    PublishMap,
    Refuse,
    StartShard,
    TakeSnapshot,
)
from coordinator.state_machine import SILENT_S, StateMachine
from coordinator.tracked_shard import EDGES, LIVE, Transition
from sarp_cluster import limits
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.wire.control import NodeState, ShardHeartbeat

NONCE = bytes(range(NONCE_BYTES))


@functools.cache
def first_map(names: tuple[str, ...]) -> SlotMap:
    return SlotMap.first(names, NONCE)


def report(
    shard: str = "s0",
    *,
    store: str = "",
    incarnation: str = "p1",
    state: NodeState = "recovering",
    epoch: int = 0,
    nonce: bytes | None = None,
    number: int = 0,
    log_bytes: int = 0,
    snapshot_age_s: float = 0.0,
    stream: str = "127.0.0.1:7000",
) -> ShardHeartbeat:
    return ShardHeartbeat(
        shard=shard,
        store=store or f"directory of {shard}",
        incarnation=f"{shard}-{incarnation}",
        pid=int(incarnation.strip("p")) + 100,
        http="",
        stream=stream,
        state=state,
        epoch=epoch,
        nonce=(NONCE if epoch else b"") if nonce is None else nonce,
        number=number,
        blocks=0,
        segments=0,
        resident_bytes=0,
        disk_bytes=0,
        log_bytes=log_bytes,
        snapshot_age_s=snapshot_age_s,
        recovery_s=0.0,
    )


class Driver:
    """A machine and what has to be true of it, whatever it is told."""

    def __init__(self, machine: StateMachine, now: float = 0.0) -> None:
        self.machine = machine
        self.now = now
        self.stores: dict[str, str] = {}
        self.holders: dict[str, str] = {}
        self.heard: dict[str, float] = {}
        self.restarts: dict[str, float] = {}
        """When a shard's incarnation last changed."""
        self.durable: dict[str, int] = {}
        """Highest epoch that a shard's present incarnation was heard to have."""
        self.map_pending = False
        self.snapshot: tuple[str, float] | None = None
        self.made: SlotMap | None = machine.slot_map
        self.published = 0
        self.last: list[Instruction] = []

    def check(self, out: list[Instruction]) -> list[Instruction]:
        machine = self.machine
        machine.validate(self.now)
        self.last = out
        for one in out:
            match one:
                case StartShard(name):
                    assert machine.shards[name].managed
                    assert not machine.shards[name].drained
                    assert machine.shards[name].state == "down"
                case KillShard(name):
                    assert machine.shards[name].managed
                    asked = any(isinstance(note, Note) and note.kind == "recover_asked" for note in out)
                    assert asked or self.now - self.heard.get(name, float("-inf")) > SILENT_S
                case MakeFirstMap(names):
                    assert machine.slot_map is None
                    assert not self.map_pending
                    assert len(names) >= machine.expected
                    self.map_pending = True
                case PublishMap(epoch):
                    assert self.made is not None
                    assert epoch == self.made.epoch > self.published
                    have = [name for name in self.made.shards if self.durable.get(name, 0) >= epoch]
                    assert 2 * len(have) > len(self.made.shards)
                    self.published = epoch
                case TakeSnapshot(name):
                    assert machine.shards[name].state == "serving"
                    if self.snapshot is not None:
                        assert self.now - self.snapshot[1] >= limits.SNAPSHOT_TIMEOUT_MS / 1000
                    self.snapshot = name, self.now
                case _:
                    pass
        # Slots do not move by themselves, and what is published stays so.
        assert machine.slot_map is self.made
        assert machine.published == self.published
        for shard in machine.shards.values():
            for step in shard.story:
                self._check_step(shard.name, step)
            if shard.holder is not None:
                assert shard.holder == self.holders.get(shard.name, shard.holder)
        return out

    def _check_step(self, name: str, step: Transition) -> None:
        restarted = step.why in ("it was heard",) and step.after in LIVE
        assert step.after in EDGES[step.before] or step.after == step.before or restarted, (name, step)

    # --- news ---------------------------------------------------------------------------------------------------------

    def heartbeat(self, message: ShardHeartbeat) -> list[Instruction]:
        name = message.shard
        out = self.machine.heartbeat(message, self.now)
        grants = [one for one in out if isinstance(one, GrantLease)]
        refusals = [one for one in out if isinstance(one, Refuse)]
        assert len(grants) + len(refusals) == 1
        if grants:
            assert self.stores.setdefault(name, message.store) == message.store
            assert (grants[0].shard, grants[0].incarnation) == (name, message.incarnation)
            if self.holders.get(name) != message.incarnation:
                self.durable[name] = 0
            self.holders[name] = message.incarnation
            self.heard[name] = self.now
            self.durable[name] = max(self.durable.get(name, 0), message.epoch)
            shard = self.machine.shards[name]
            assert shard.holder == message.incarnation
            assert shard.lease_end == self.now + self.machine.lease_ms / 1000
        else:
            assert len(out) <= 2  # it says why, and nothing else comes of it
        return self.check(out)

    def wait(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self.check(self.machine.tick(self.now))

    def probe(self, name: str, *, answered: bool) -> list[Instruction]:
        call = self.machine.probe_answered if answered else self.machine.probe_failed
        return self.check(call(name, self.now))

    def exit(self, name: str, pid: int) -> list[Instruction]:
        return self.check(self.machine.child_exited(name, pid, self.now))

    def make_map(self, names: Iterable[str] | None = None) -> list[Instruction]:
        before = self.machine.slot_map
        if before is not None:
            slot_map = before.changed(nonce=NONCE)
        else:
            slot_map = first_map(tuple(names or sorted(self.machine.shards)))
        self.made, self.map_pending = slot_map, False
        return self.check(self.machine.map_made(slot_map, self.now))

    def install(self, name: str) -> list[Instruction]:
        """It has the present map."""
        assert self.made is not None
        if name in self.holders:
            self.durable[name] = max(self.durable.get(name, 0), self.made.epoch)
        return self.check(self.machine.installed(name, self.made.epoch, self.made.nonce, 0, self.now))

    def snapshot_done(self, name: str, error: str | None = None) -> list[Instruction]:
        if self.snapshot is not None and self.snapshot[0] == name:
            self.snapshot = None
        return self.check(self.machine.snapshot_done(name, error, self.now))

    def state(self, name: str = "s0") -> str:
        return self.machine.shards[name].state
