"""What a coordinator does while it leads: executes the state machine's instructions and tells it what came of them.

What takes long runs as a job of its own, one of a kind for a shard at a time. A job that fails is not tried again here:
the machine asks for it again as long as it is wanted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Final, assert_never

from coordinator.instructions import (
    DrainShard,
    FetchView,
    GrantLease,
    Install,
    Instruction,
    KeepRecord,
    KillShard,
    MakeFirstMap,
    Note,
    PublishMap,
    Refuse,
    StartShard,
    TakeSnapshot,
)
from coordinator.keyless import KeylessChanges
from coordinator.shard_lines import ShardLines
from coordinator.state_machine import StateMachine
from coordinator.supervisor import Supervisor
from sarp_cluster import limits
from sarp_cluster.cluster.membership import Membership, Records, ShardRecord
from sarp_cluster.cluster.registry import Registry
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.cluster.view import Address, ClusterView
from sarp_cluster.errors import ConnectionLostError, SarpError, StorePoisonedError
from sarp_cluster.observe.timeline import Timeline
from sarp_cluster.wire import control, messages

logger: Final = logging.getLogger(__name__)

TICK_S: Final = 0.1
RETRY_S: Final = 0.02
PAUSE_S: Final = 1.0
CALL_TIMEOUT_S: Final = limits.CHANGE_TIMEOUT_MS / 1000
WAITED_FOR: Final = ("recovering", "serving", "draining", "suspect")
"""States of shards that may be answering matches, or may begin to before they are heard again: a change without a key
is made when they have it. One that is down is waited for while its lease may last, unless its process is known to have
ended: it may be answering whom we do not see. After that routers see to it (shard.ownership)."""


class ControlLoop:
    """One term of a coordinator. `run` runs it; it ends by being cancelled, or by what it cannot go on after."""

    def __init__(
        self,
        records: Records,
        *,
        expected: int,
        splits: Mapping[int, int],
        cluster: str,
        hello: Callable[[], control.Hello],
        tls: ssl.SSLContext | None = None,
        membership: Membership,
        timeline: Timeline,
        supervisor: Supervisor | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._membership = membership
        self._timeline = timeline
        self._supervisor = supervisor
        self._splits = splits
        self.view = ClusterView(cluster, registry=Registry(records.entries, records.number))
        """What everybody may know: the published map, the registry, where the shards are."""
        self.machine = StateMachine(
            self._loop.time(),
            expected=expected,
            managed=() if supervisor is None else supervisor.names,
            drained=() if supervisor is None else supervisor.held,
            records=records.shards,
            slot_map=records.slot_map,
            number=records.number,
        )
        self.changes = KeylessChanges(
            self.view.registry, membership, self._spread, self.machine.changed, self.machine.highest_number
        )
        self._lines = ShardLines(hello, self._probed, tls)
        self._jobs: dict[tuple[str, str], asyncio.Task[None]] = {}  # by kind and shard
        self._records: dict[str, ShardRecord] = {}
        """Of shards, to be kept."""
        self._record_due = asyncio.Event()
        self.nodes: list[control.NodeAddress] = []
        """Where the shards are."""
        self._progress = asyncio.Event()
        """A shard has more than before, or another state."""
        self._failed: asyncio.Future[None] = self._loop.create_future()

    # --- news for the machine -----------------------------------------------------------------------------------------

    def heartbeat(self, report: control.ShardHeartbeat) -> GrantLease | Refuse:
        """A shard was heard."""
        out = self.machine.heartbeat(report, self._loop.time())
        self._act(out)
        return next(one for one in out if isinstance(one, GrantLease | Refuse))

    def exited(self, name: str, pid: int) -> None:
        """The process of a supervised shard has ended."""
        self._act(self.machine.child_exited(name, pid, self._loop.time()))

    def _probed(self, name: str, answered: bool) -> None:
        call = self.machine.probe_answered if answered else self.machine.probe_failed
        self._act(call(name, self._loop.time()))

    def drain(self, name: str) -> None:
        """An operator wants a shard to end in order."""
        self._act(self.machine.drain(name, self._loop.time()))

    def snapshot(self, name: str) -> None:
        """An operator wants a snapshot."""
        self._act(self.machine.snapshot(name, self._loop.time()))

    async def recover(self, name: str) -> None:
        """An operator wants a shard to be started again."""
        out = self.machine.recover(name, self._loop.time())
        if self._supervisor is not None:
            await self._supervisor.release(name)
            self._supervisor.calm(name)
        self._act(out)

    # --- instructions -------------------------------------------------------------------------------------------------

    def _act(self, instructions: Iterable[Instruction]) -> None:
        changed = False
        for one in instructions:
            self._execute(one)
            changed = changed or isinstance(one, Note | KeepRecord)  # no state and no place changes without
        if changed:
            self._look_where_shards_are()
        self._progress.set()

    def _execute(self, one: Instruction) -> None:
        match one:
            case GrantLease() | Refuse():
                pass  # the answer to a heartbeat, which is being made
            case KeepRecord(record):
                self._records[record.shard] = record
                self._record_due.set()
                self._lines.know(self.machine.shards.values())
                self._lines.moved(record.shard)
            case Install(shard):
                self._job("install", shard, partial(self._install, shard))
            case FetchView(shard):
                self._job("fetch", shard, partial(self._fetch, shard))
            case MakeFirstMap(shards):
                self._job("map", "", partial(self._make_first_map, shards))
            case PublishMap():
                self.view.slot_map = self.machine.slot_map
            case StartShard(shard):
                if self._supervisor is not None:
                    self._supervisor.start(shard)
            case KillShard(shard):
                if self._supervisor is not None:
                    self._supervisor.kill(shard)
                    self.note(shard, "shard_killed", "it holds its directory and does not answer")
            case DrainShard(shard):
                self._job("drain", shard, partial(self._drain, shard))
            case TakeSnapshot(shard):
                self._job("snapshot", shard, partial(self._take_snapshot, shard))
            case Note(node, kind, text):
                self.note(node, kind, text)
            case _:
                assert_never(one)

    def _job(self, kind: str, shard: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something done, unless it is being done already."""
        if (kind, shard) not in self._jobs:
            task = self._jobs[kind, shard] = self._loop.create_task(make())
            task.add_done_callback(partial(self._job_done, (kind, shard)))

    def _job_done(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._jobs[key]
        self._progress.set()
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, SarpError | TimeoutError) and not isinstance(error, StorePoisonedError):
            logger.info("%s %s: %s", *key, str(error) or "no answer in time")
        elif not self._failed.done():
            self._failed.set_exception(error)

    async def _call(
        self, shard: str, name: str, message: object, reply: type[messages.Reply], timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:  # noqa: ANN401  # what `reply` is; the callers below say so
        peer = self._lines.peer(shard)
        if peer is None:
            raise ConnectionLostError(f"{shard} has not said where it is")
        async with asyncio.timeout(timeout_s):
            await peer.wait_connected()
            return await peer.call(name, message, reply, timeout_s)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def _install(self, name: str) -> None:
        """Give a shard all that it lacks."""
        shard = self.machine.shards[name]
        while True:
            slot_map, registry = self.machine.slot_map, self.view.registry
            lacks = slot_map is not None and shard.epoch < slot_map.epoch
            if not lacks and shard.number >= registry.number:
                return
            reply: control.InstallReply = await self._call(
                name,
                "install",
                control.InstallRequest(
                    slot_map=slot_map.packed() if slot_map is not None and lacks else None,
                    number=registry.number,
                    above=shard.number,
                    entries=registry.entries(shard.number),
                    nodes=self.nodes,
                ),
                control.InstallReply,
            )
            before = shard.epoch, shard.number
            now = self._loop.time()
            self._act(self.machine.installed(name, reply.epoch, reply.nonce, reply.number, now))
            if (shard.epoch, shard.number) == before:
                return  # it does not take it; it says more with its next heartbeat

    async def _fetch(self, name: str) -> None:
        """Take over what a shard knows and we do not: our records were lost, or are old."""
        ours = self.machine.slot_map
        reply: control.View = await self._call(
            name,
            "fetch",
            control.FetchRequest(
                epoch=0 if ours is None else ours.epoch,
                nonce=b"" if ours is None else ours.nonce,
                number=self.view.number,
            ),
            control.View,
        )
        if reply.number > self.view.number:
            await self.changes.take_over(reply.entries, reply.number)
            self.note(name, "changes_taken_over", f"up to {reply.number}")
        slot_map = None if reply.slot_map is None else SlotMap.unpacked(reply.slot_map)
        if slot_map is not None and slot_map.supersedes(ours):
            await self._membership.put_slot_map(slot_map, expected=ours)
            self.note(name, "map_taken_over", f"epoch {slot_map.epoch}")
            self._act(self.machine.map_made(slot_map, self._loop.time()))

    async def _make_first_map(self, shards: tuple[str, ...]) -> None:
        slot_map = SlotMap.first(shards, secrets.token_bytes(NONCE_BYTES), self._splits)
        try:
            await self._membership.put_slot_map(slot_map, expected=None)
        except SarpError:
            self.machine.map_failed()
            raise
        self._act(self.machine.map_made(slot_map, self._loop.time()))

    async def _take_snapshot(self, name: str) -> None:
        failure: str | None = None
        try:
            command = control.ShardCommand(shard=name)
            await self._call(name, "snapshot_shard", command, messages.Done, limits.SNAPSHOT_TIMEOUT_MS / 1000)
        except (SarpError, TimeoutError) as error:
            failure = str(error) or "no answer in time"
        self._act(self.machine.snapshot_done(name, failure, self._loop.time()))

    async def _drain(self, name: str) -> None:
        if self._supervisor is not None and name in self._supervisor.names:
            await self._supervisor.hold(name)
        try:
            command = control.ShardCommand(shard=name)
            await self._call(name, "drain_shard", command, messages.Done, limits.SNAPSHOT_TIMEOUT_MS / 1000)
        except (SarpError, TimeoutError) as error:
            self.note(name, "drain_unanswered", str(error) or "no answer in time")

    # --- changes without a key ----------------------------------------------------------------------------------------

    def settled(self) -> bool:
        """May changes be numbered? Not before a majority of the map's shards has said what they know."""
        return self.machine.settled()

    async def _spread(self, number: int) -> list[str]:
        """See keyless.Spread."""

        def missing() -> list[str]:
            return sorted(
                shard.name
                for shard in self.machine.shards.values()
                if ((shard.state in WAITED_FOR and shard.epoch) or self.machine.may_answer(shard.name))
                and shard.number < number
            )

        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                tried: set[str] = set()
                while names := missing():
                    if any(name in tried and ("install", name) not in self._jobs for name in names):
                        await asyncio.sleep(RETRY_S)  # it did not take it
                    self._progress.clear()
                    for name in names:
                        self._job("install", name, partial(self._install, name))
                    tried.update(names)
                    await self._progress.wait()
        except TimeoutError:
            pass
        return missing()

    # --- looking ------------------------------------------------------------------------------------------------------

    def _look_where_shards_are(self) -> None:
        joined = [shard for shard in self.machine.shards.values() if shard.store]
        self.view.addresses = {
            shard.name: Address(shard.http, shard.stream, shard.incarnation, shard.state) for shard in joined
        }
        self.nodes = [
            control.NodeAddress(
                shard=shard.name,
                incarnation=shard.incarnation,
                http=shard.http,
                stream=shard.stream,
                state=shard.state,
            )
            for shard in joined
        ]

    def note(self, node: str, kind: str, text: str) -> None:
        """Enter something into the timeline, and into the log."""
        self._timeline.note(node, kind, text)
        logger.info("%s %s: %s", kind, node or "cluster", text)

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Do it all, until something fails that only a restart mends."""
        self._lines.know(self.machine.shards.values())
        self._look_where_shards_are()
        if self._supervisor is not None:
            for name in self._supervisor.names:
                if self._supervisor.pid(name) is None:
                    self.exited(name, 0)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.changes.run())
                group.create_task(self._lines.run())
                group.create_task(self._keep_records())
                group.create_task(self._tick())
                group.create_task(self._watch())
        finally:
            jobs = list(self._jobs.values())
            for task in jobs:
                task.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self._lines.close()
            self._failed.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._act(self.machine.tick(self._loop.time()))

    async def _watch(self) -> None:
        """A job failed in a way that is a bug, or a broken disk."""
        await self._failed

    async def _keep_records(self) -> None:
        while True:
            await self._record_due.wait()
            self._record_due.clear()
            for name, record in list(self._records.items()):
                try:
                    await self._membership.put_shard(record)
                except StorePoisonedError:
                    raise
                except SarpError as error:
                    logger.warning("the record of %s is not kept: %s", name, error)
                    self._record_due.set()
                    await asyncio.sleep(PAUSE_S)
                else:
                    if self._records[name] is record:
                        del self._records[name]
