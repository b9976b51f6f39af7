"""The control plane's decisions (design §7): pure. Time and news come in, instructions go out, nothing waits.

Its state changes through the methods that return instructions, and through them only. What the network brings never
raises: late, doubled and contradicting news are refused or passed over.

Invariants (checked by `validate`):
  C1  at most one incarnation of a shard holds a lease: the present one. Another of the same store takes over at once,
      since it has the directory's lock; another store under the same name is refused, and so are both of two that
      have the same store and are there at once;
  C2  a shard's store never changes;
  C3  states move along tracked_shard.EDGES only, and each step is in the shard's story;
  C4  slots never move by themselves: a map is made here once, when there was none;
  C5  the published epoch never goes back, and a majority of its map's shards had it when it was published;
  C6  at most one snapshot is under way (snapshot_turns);
  C7  only supervised shards are started or killed, and none is killed that is heard, unless an operator wants it
      recovered;
  C8  a lease ends by time, by takeover or by the end of its process, never by suspicion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

from coordinator.identity import refusal
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
)
from coordinator.snapshot_turns import SnapshotTurns
from coordinator.tracked_shard import TrackedShard
from sarp_cluster import limits
from sarp_cluster.cluster.membership import ShardRecord
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.errors import BadRequestError, invariant
from sarp_cluster.wire.control import ShardHeartbeat
from sarp_cluster.wire.messages import ShardState

SILENT_S: Final = limits.SHARD_SILENT_MS / 1000
KILL_AGAIN_S: Final = 5.0


class StateMachine:
    """The shards of a cluster, and what is to be done about them. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        now: float,
        *,
        expected: int,
        managed: Iterable[str] = (),
        drained: Iterable[str] = (),
        records: Mapping[str, ShardRecord] | None = None,
        slot_map: SlotMap | None = None,
        number: int = 0,
        lease_ms: int = limits.LEASE_MS,
    ) -> None:
        self.expected = expected
        """Shards that have to join before the first map is made."""
        self.lease_ms = lease_ms
        self.slot_map = slot_map
        self.published = 0
        """Epoch of the map that everybody may know. After a restart it is found out again."""
        self.number = number
        self.shards: dict[str, TrackedShard] = {}
        self._first_map_pending = False
        self._began = now
        self._snapshots = SnapshotTurns()
        self._managed, drained = frozenset(managed), frozenset(drained)
        for name in sorted(self._managed):
            self._add(name, now).drained = name in drained
        for record in (records or {}).values():
            shard = self.shards.get(record.shard) or self._add(record.shard, now)
            shard.store, shard.incarnation = record.store, record.incarnation
            shard.http, shard.stream = record.http, record.stream
            # What a former coordinator granted, as late as it can have been: it may be the last thing it did.
            shard.holder, shard.lease_end = record.incarnation, now + lease_ms / 1000
        self._know_owners()

    def _add(self, name: str, now: float) -> TrackedShard:
        shard = self.shards[name] = TrackedShard(name, now, managed=name in self._managed)
        return shard

    def _know_owners(self) -> None:
        """Shards of the map of which there are no records, because those were lost: a former coordinator may have
        granted them leases, too."""
        names = () if self.slot_map is None else self.slot_map.shards
        for name in names:
            if name not in self.shards:
                shard = self._add(name, self._began)
                shard.holder, shard.lease_end = shard.incarnation, self._began + self.lease_ms / 1000

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def heartbeat(self, report: ShardHeartbeat, now: float) -> list[Instruction]:
        """A shard was heard: exactly one GrantLease or Refuse is among what comes of it."""
        shard = self.shards.get(report.shard)
        if shard is None:
            if len(self.shards) >= limits.SHARDS_MAX:
                return [Refuse(report.shard, report.incarnation, "too_many")]
            shard = self._add(report.shard, now)
        refused = refusal(
            shard, report, now, self.slot_map, silent=self._silent(shard, now), lease_s=self.lease_ms / 1000
        )
        if refused:
            return refused
        out: list[Instruction] = []
        restarted = report.incarnation != shard.incarnation
        if restarted or not shard.store or (shard.http, shard.stream) != (report.http, report.stream):
            self._take_over(shard, report, out)
        if restarted:
            shard.epoch, shard.nonce, shard.number = report.epoch, report.nonce, report.number
        else:  # it keeps both durably: less is an older word that came late
            shard.epoch, shard.nonce = max((shard.epoch, shard.nonce), (report.epoch, report.nonce))
            shard.number = max(shard.number, report.number)
        shard.heard_at, shard.report, shard.pid, shard.killed_at = now, report, report.pid, None
        if report.state == "draining":
            shard.draining_incarnation = shard.incarnation
        if restarted:
            shard.probes_failed = 0
        shard.holder, shard.lease_end = shard.incarnation, now + self.lease_ms / 1000
        out.append(GrantLease(shard.name, shard.incarnation, self.lease_ms))
        self._judge(shard, now, out, "it was heard", restarted=restarted)
        self._compare(shard, out)
        self._look_at_maps(now, out)
        return out

    @staticmethod
    def _take_over(shard: TrackedShard, report: ShardHeartbeat, out: list[Instruction]) -> None:
        """It joins, or is another process or elsewhere than before."""
        if not shard.store:
            out.append(Note(shard.name, "shard_joined", f"directory {report.store}, process {report.pid}"))
        elif report.incarnation != shard.incarnation:
            out.append(Note(shard.name, "shard_restarted", f"it is process {report.pid} now"))
        if report.incarnation != shard.incarnation:
            if shard.incarnation:
                shard.retired.append(shard.incarnation)
            if report.incarnation in shard.retired:
                shard.retired.remove(report.incarnation)
            shard.ghost = None
        shard.store, shard.incarnation = report.store, report.incarnation
        shard.http, shard.stream = report.http, report.stream
        out.append(
            KeepRecord(
                ShardRecord(
                    shard=shard.name,
                    store=shard.store,
                    incarnation=shard.incarnation,
                    http=shard.http,
                    stream=shard.stream,
                )
            )
        )

    def _compare(self, shard: TrackedShard, out: list[Instruction]) -> None:
        """Who knows more?"""
        epoch = 0 if self.slot_map is None else self.slot_map.epoch
        if shard.epoch > epoch or shard.number > self.number:
            out.append(FetchView(shard.name))
        if shard.epoch < epoch or shard.number < self.number:
            out.append(Install(shard.name))

    # --- maps and changes without a key -------------------------------------------------------------------------------

    def _look_at_maps(self, now: float, out: list[Instruction]) -> None:
        """Is it time for the first map, or for the present one to be published?"""
        slot_map = self.slot_map
        if slot_map is None:
            heard = [shard for shard in self.shards.values() if not self._silent(shard, now)]
            if not self._first_map_pending and len(heard) >= self.expected and not any(one.epoch for one in heard):
                self._first_map_pending = True
                out.append(MakeFirstMap(tuple(sorted(shard.name for shard in heard))))
        elif self.published < slot_map.epoch and self._have(slot_map) * 2 > len(slot_map.shards):
            self.published = slot_map.epoch
            out.append(PublishMap(slot_map.epoch))
            out.append(Note("", "map_published", f"epoch {slot_map.epoch}: most of its shards have it"))

    def _have(self, slot_map: SlotMap) -> int:
        """How many of its shards have it durably."""
        shards = (self.shards.get(name) for name in slot_map.shards)
        return sum(one is not None and (one.epoch, one.nonce) == (slot_map.epoch, slot_map.nonce) for one in shards)

    def settled(self) -> bool:
        """May changes be numbered? Not before a majority of the map's shards has said what it knows, and what those
        know that we hear is fetched."""
        slot_map = self.slot_map
        return (
            slot_map is not None
            and self.published == slot_map.epoch
            and all(one.number <= self.number or one.state == "down" for one in self.shards.values())
        )

    def highest_number(self) -> int:
        """Of the changes that any shard has told of: none of them is given again, fetched or not."""
        return max((shard.number for shard in self.shards.values()), default=0)

    def map_made(self, slot_map: SlotMap, now: float) -> list[Instruction]:
        """There is a map, kept in the membership: the first, a later one, or one that a shard knew."""
        if not slot_map.supersedes(self.slot_map):
            return []
        self.slot_map = slot_map
        self._first_map_pending = False
        self._know_owners()
        out: list[Instruction] = [Note("", "map_made", f"epoch {slot_map.epoch} over {len(slot_map.shards)} shards")]
        out += [
            Install(one.name) for one in self.shards.values() if one.heard_at is not None and one.epoch < slot_map.epoch
        ]
        self._look_at_maps(now, out)
        return out

    def map_failed(self) -> None:
        """The first map could not be made: try again."""
        self._first_map_pending = False

    def changed(self, number: int) -> None:
        """There are changes without a key up to this number."""
        self.number = max(self.number, number)

    def installed(self, name: str, epoch: int, nonce: bytes, number: int, now: float) -> list[Instruction]:
        """A shard has this durably."""
        shard = self.shards.get(name)
        out: list[Instruction] = []
        if shard is not None and shard.incarnation:
            shard.epoch, shard.nonce = max((shard.epoch, shard.nonce), (epoch, nonce))
            shard.number = max(shard.number, number)
            self._judge(shard, now, out, "it has a map")
            self._look_at_maps(now, out)
        return out

    # --- health -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _silent(shard: TrackedShard, now: float) -> bool:
        return shard.heard_at is None or now - shard.heard_at > SILENT_S

    def _judge(
        self, shard: TrackedShard, now: float, out: list[Instruction], why: str, *, restarted: bool = False
    ) -> None:
        """Bring the state in line with what is known."""
        silent, failing = self._silent(shard, now), shard.probes_failed
        if not silent and not failing:
            self._move(shard, shard.said(), why, now, out, restarted=restarted)
        elif shard.state == "suspect":
            if silent and failing >= limits.PROBES_FAILED_MAX:
                self._move(shard, "down", f"silent, and {failing} probes failed", now, out)
                self._end_process(shard, now, out)
        elif not silent or (shard.state != "down" and shard.store and self._waited(shard, now)):
            if shard.state == "down":  # it is heard again, and does not answer yet
                self._move(shard, shard.said(), why, now, out)
            why = f"silent for more than {SILENT_S:g} s" if silent else "a probe failed"
            self._move(shard, "suspect", why, now, out)

    @staticmethod
    def _waited(shard: TrackedShard, now: float) -> bool:
        """Of a shard that was never heard: was there time for it?"""
        return shard.heard_at is not None or now - shard.since > SILENT_S

    @staticmethod
    def _move(
        shard: TrackedShard, state: ShardState, why: str, now: float, out: list[Instruction], *, restarted: bool = False
    ) -> None:
        before = shard.state
        if shard.move(state, why, now, restarted=restarted):
            out.append(Note(shard.name, f"shard_{state}", f"{before} -> {state}: {why}"))

    @staticmethod
    def _end_process(shard: TrackedShard, now: float, out: list[Instruction]) -> None:
        """A stopped process holds the directory's lock: nobody else can serve its slots before it is gone."""
        if shard.managed:
            shard.killed_at = now
            out.append(KillShard(shard.name))

    def probe_answered(self, name: str, now: float) -> list[Instruction]:
        """A shard answered a probe."""
        return self._probed(name, now, answered=True)

    def probe_failed(self, name: str, now: float) -> list[Instruction]:
        """A shard did not answer a probe in time, or could not be reached."""
        return self._probed(name, now, answered=False)

    def _probed(self, name: str, now: float, *, answered: bool) -> list[Instruction]:
        shard = self.shards.get(name)
        out: list[Instruction] = []
        if shard is not None and shard.store:
            shard.probes_failed = 0 if answered else shard.probes_failed + 1
            self._judge(shard, now, out, "it answers probes")
        return out

    def child_exited(self, name: str, pid: int, now: float) -> list[Instruction]:
        """The process of a supervised shard has ended, or was not there when the coordinator began (pid 0)."""
        shard = self.shards.get(name)
        if shard is None or not shard.managed:
            return []
        out: list[Instruction] = []
        if shard.live and shard.pid not in (0, pid) and not self._silent(shard, now):
            return [Note(name, "process_ended", f"process {pid} ended; {shard.pid} is the shard")]
        shard.holder, shard.lease_end, shard.killed_at, shard.heard_at = None, now, None, None
        if shard.state != "down":
            self._move(shard, "down", f"its process ended ({pid})" if pid else "it has no process", now, out)
        elif pid:
            out.append(Note(name, "process_ended", f"process {pid}, before it was heard"))
        if shard.drained:
            out.append(Note(name, "shard_drained", "its process has ended; it is not started again"))
        else:
            out.append(StartShard(name))
        return out

    def may_answer(self, name: str) -> bool:
        """May a shard that is down, or that we have not heard since we lead, be there all the same, and answer?

        While its lease may last, and its process is not known to have ended, nobody can say.
        """
        shard = self.shards[name]
        return shard.holder is not None and (shard.state == "down" or shard.heard_at is None)

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        out: list[Instruction] = []
        for shard in self.shards.values():
            if shard.holder is not None and now >= shard.lease_end:
                shard.holder = None
            self._judge(shard, now, out, "it is heard and answers")
            if shard.killed_at is not None and now - shard.killed_at >= KILL_AGAIN_S and shard.state == "down":
                self._end_process(shard, now, out)
        self._look_at_maps(now, out)
        return out + self._snapshots.next(self.shards.values(), now)

    # --- snapshots and operators --------------------------------------------------------------------------------------

    def snapshot_done(self, name: str, error: str | None, now: float) -> list[Instruction]:
        """A snapshot has ended."""
        return self._snapshots.done(name, error, now)

    def _asked(self, name: str) -> TrackedShard:
        shard = self.shards.get(name)
        if shard is None or not shard.store:
            raise BadRequestError(f"shard: there is none called {name[:64]!r}", field="shard")
        return shard

    def snapshot(self, name: str, now: float) -> list[Instruction]:
        """An operator wants a snapshot. It comes as soon as no other is under way."""
        shard = self._asked(name)
        if shard.state != "serving":
            raise BadRequestError(f"shard: {name!r} is {shard.state}, it takes no snapshot", field="shard")
        self._snapshots.want(name)
        return self._snapshots.next(self.shards.values(), now)

    def drain(self, name: str, now: float) -> list[Instruction]:
        """An operator wants a shard to end in order."""
        shard = self._asked(name)
        if shard.state not in ("recovering", "serving", "draining"):
            raise BadRequestError(f"shard: {name!r} is {shard.state}, it cannot be drained", field="shard")
        shard.drained = True
        return [DrainShard(name), Note(name, "drain_asked", "by an operator")]

    def recover(self, name: str, now: float) -> list[Instruction]:
        """An operator wants a shard that does not serve to be started again."""
        shard = self._asked(name)
        if shard.state not in ("suspect", "down"):
            raise BadRequestError(f"shard: {name!r} is {shard.state}, there is nothing to recover", field="shard")
        if not shard.managed:
            raise BadRequestError(f"shard: {name!r} is not supervised here; start it where it runs", field="shard")
        shard.drained = False
        out: list[Instruction] = [Note(name, "recover_asked", "by an operator")]
        if shard.state == "suspect":
            self._move(shard, "down", "an operator has it recovered", now, out)
            self._end_process(shard, now, out)
        elif shard.killed_at is None:
            out.append(StartShard(name))
        return out

    # --- looking ------------------------------------------------------------------------------------------------------

    def validate(self, now: float) -> None:
        """Raise InvariantViolationError for the first violated invariant."""
        for shard in self.shards.values():
            invariant(shard.holder in (None, shard.incarnation), "C1: a lease of another incarnation", shard=shard.name)
            invariant(shard.incarnation not in shard.retired, "C1: the present one is retired", shard=shard.name)
            steps = list(shard.story)
            whole = all(a.after == b.before for a, b in pairwise(steps)) and (
                not steps or steps[-1].after == shard.state
            )
            invariant(whole, "C3: a gap in a story", shard=shard.name)
            invariant(not shard.live or shard.killed_at is None, "C7: killed and heard", shard=shard.name)
            invariant(shard.managed or shard.killed_at is None, "C7: killed and not ours", shard=shard.name)
        epoch = 0 if self.slot_map is None else self.slot_map.epoch
        invariant(self.published <= epoch, "C5: published what is not there", published=self.published)
