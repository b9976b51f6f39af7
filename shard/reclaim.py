"""Reclaiming the space of log files, in bounded steps (design §5; what is decided, and why: storage.reclaim).

One file at a time: it is looked through; segments that point into it are written anew at the log's end, whole; records
of namespaces and workers that are in force are put again. Once all that is durable, so is made a record that the file
is reclaimed; then it is deleted. Where this ends early, by a crash too, it is done again: until the record is durable
nothing has changed but that some things were written twice, and from then on recovery deletes the file.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from sarp_cluster import limits
from sarp_cluster.errors import InvariantViolationError
from sarp_cluster.storage.log import LogStore
from sarp_cluster.storage.log_scan import FileScan, free_slots, live_slots, slots_in, still_in
from sarp_cluster.storage.reclaim import Pace, choose
from sarp_cluster.storage.record import RecordType
from shard.namespaces import NamespaceRegistry
from shard.repair import repair
from shard.rewriting import rewrite
from shard.state import IndexState

COUNT_ROWS_A_STEP: Final = 8_192
"""Rows of the segment table that one step counts, after the store was opened."""

RECORDS_A_STEP: Final = 256
"""Records of namespaces and workers that one step puts again."""

LOOKS_A_FILE: Final = 16
"""While there is nothing to reclaim, it is looked again whenever this part of a log file was appended."""

NAMED: Final = frozenset({RecordType.NAMESPACE, RecordType.WORKER, RecordType.WORKER_MARK})
"""Types of records that are put again where they are in force. So are removals, while their slot is free (images that
they end may stand in older files), and records that tell of lost ones, while the file of those is there. Nothing is
gone with the others: headers, groups, what changed in the routing directory (the file lies before the oldest snapshot),
reclaimed files (a header that was written later does not name them)."""


@dataclass
class _Victim:
    """The file that is being reclaimed, and how far that is."""

    number: int
    bytes: int
    written: bool = False
    """All of it is on the disk, so that it can be looked through."""
    looked_through: int = 0
    """Offset up to which it is."""
    slots: deque[int] = field(default_factory=deque)
    """Segments that are to be written anew."""
    others: dict[tuple[int, int], None] = field(default_factory=dict)
    """(type, number) of records to be put again if they are in force."""
    damaged: bool = False
    repair_hand: int = 1
    """Slot from which on segments are looked for that point into it and cannot be read; 0: that was done."""
    copied: bool = False
    """What takes its place is durable."""
    recorded: bool = False
    """The record that it is reclaimed was put."""
    durable: bool = False
    """And is durable."""


class Reclaim:
    """Which file is being reclaimed, and one step of it at a time."""

    def __init__(self, state: IndexState, namespaces: NamespaceRegistry, store: LogStore, *, ratio_max: float) -> None:
        self._state = state
        self._namespaces = namespaces
        self._store = store
        self._ratio_max = ratio_max
        self._pace = Pace(state.config.reclaim_bytes_per_second)
        self._victim: _Victim | None = None
        self._look_at = 0
        """Bytes appended at which to look whether there is something to do."""
        self._looked_with: tuple[int | None, int | None] | None = None
        self._blocked: dict[int, int] = {}
        """Files with segments that cannot be read, and how many bytes: they stay until that changes."""
        self.files_reclaimed = 0
        self.bytes_reclaimed = 0
        self.bytes_rewritten = 0

    @property
    def files_blocked(self) -> int:
        """Files that cannot be reclaimed because something in them that is in use cannot be read."""
        return len(self._blocked)

    # --- when ---------------------------------------------------------------------------------------------------------

    @property
    def at_work(self) -> bool:
        """Is it under way with something, at its pace?"""
        return self._victim is not None or not self._store.space.files.counted

    @property
    def due(self) -> bool:
        """Is there something to do that was not begun yet? Cheap: asked after each insert."""
        return not self.at_work and self._look_due

    @property
    def _look_due(self) -> bool:
        return self._store.bytes_appended >= self._look_at or self._looked_with != self._circumstances

    @property
    def _circumstances(self) -> tuple[int | None, int | None]:
        """Where these change, there may be something to do although nothing was appended."""
        space = self._store.space
        return space.oldest_needed_file, space.free_bytes if self._store.full else None

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next step at its pace; None: there is none to be taken."""
        if not (self.at_work or self._look_due):
            return None
        if self._state.table_unloaded:
            return 1.0
        if self._store.full:
            return 0.0
        self._pace.earn(now, self._store.bytes_appended - self.bytes_rewritten)
        return self._pace.wait_s

    # --- steps --------------------------------------------------------------------------------------------------------

    async def step(self) -> bool:
        """Do one bounded piece of work. False when there is nothing to do.

        Raises StoreFullError where there is no space for it; later it goes on from there.
        """
        files, victim = self._store.space.files, self._victim
        if self._state.table_unloaded:
            return False
        if not files.counted:
            files.count(self._state.table, COUNT_ROWS_A_STEP)
        elif victim is None:
            return self._look_due and self._choose()
        elif not victim.written:
            await self._store.sync()
            victim.written = True
        elif victim.slots:
            await self._rewrite(victim)
        elif victim.looked_through < victim.bytes:
            await self._look_through(victim)
        elif files.live_in(victim.number) and victim.repair_hand:
            await self._repair(victim)
        elif files.live_in(victim.number):
            self._blocked[victim.number] = files.live_in(victim.number)
            self._victim = None
        elif victim.others:
            self._put_again(victim)
        elif self._store.space.in_force.bytes_in(victim.number):
            raise InvariantViolationError(f"log file {victim.number} has records in force that were not found in it")
        elif not victim.copied:
            await self._store.sync()
            victim.copied = True
        elif not victim.durable:
            if not victim.recorded:
                self._store.put_reclaimed(victim.number)
                victim.recorded = True
            await self._store.sync()
            victim.durable = True
        else:
            await self._store.remove_file(victim.number)
            self.files_reclaimed += 1
            self.bytes_reclaimed += victim.bytes
            self._victim = None
        return True

    def _choose(self) -> bool:
        store = self._store
        space = store.space
        self._blocked = {number: live for number, live in self._blocked.items() if space.files.live_in(number) == live}
        situation = space.situation(self._ratio_max, pressed=store.full)
        number = choose(space.log_files(), situation, self._blocked)
        if number is None:
            self._look_at = store.bytes_appended + situation.file_bytes_max // LOOKS_A_FILE
            self._looked_with = self._circumstances
            return False
        if number == store.position[0]:
            store.next_file()
        else:
            self._victim = _Victim(number, space.files.bytes_of(number))
        return True

    async def _look_through(self, victim: _Victim) -> None:
        loop = asyncio.get_running_loop()
        try:
            found: FileScan = await loop.run_in_executor(
                self._state.readers, self._store.space.scan, victim.number, victim.looked_through
            )
        except OSError:
            # What is not seen is not written anew: if segments point there the file stays, as with other damage.
            found = FileScan(b"", [], victim.bytes, True)
        self._pace.spend(found.end - victim.looked_through)
        victim.slots.extend(live_slots(self._state.table, found.segments))
        for kind, number in found.others:
            if kind in NAMED or kind in (RecordType.REMOVAL, RecordType.LOST):
                victim.others[kind, number] = None
            elif kind != RecordType.RECLAIMED:
                raise InvariantViolationError(f"a record of type {kind} in log file {victim.number}")
        if found.damaged and not victim.damaged:
            # What stood there may have been a namespace's, a worker's or a removal.
            victim.damaged = True
            for number in range(1, len(self._namespaces) + 1):
                victim.others[RecordType.NAMESPACE, number] = None
            for number in range(self._state.workers.count):
                victim.others[RecordType.WORKER, number] = None
            for slot in free_slots(self._state.table):
                victim.others[RecordType.REMOVAL, slot] = None
        victim.looked_through = found.end

    async def _rewrite(self, victim: _Victim) -> None:
        """Write some segments anew. One that has changed meanwhile comes again if it still points into the file."""
        state = self._state
        await self._store.room(reclaiming=True)
        taken = [victim.slots[i] for i in range(min(limits.BACKFILL_SEGMENTS_A_STEP, len(victim.slots)))]
        slots = still_in(state.table, taken, victim.number)
        if slots:
            done = await rewrite(state, slots, reclaiming=True)
            self.bytes_rewritten += done.bytes
            self._pace.spend(done.bytes)
            slots = [slot for slot in still_in(state.table, slots, victim.number) if slot not in done.unreadable]
        for _ in taken:
            victim.slots.popleft()
        victim.slots.extend(slots)

    async def _repair(self, victim: _Victim) -> None:
        """Repair what still points into the file: what does not verify was not found in it."""
        table = self._state.table
        slots, victim.repair_hand = slots_in(table, victim.number, victim.repair_hand, COUNT_ROWS_A_STEP)
        for slot in slots:
            await repair(self._state, slot)

    def _put_again(self, victim: _Victim) -> None:
        """Put records that are in force again: what they say now."""
        space, workers = self._store.space, self._state.workers
        before = self._store.bytes_appended
        for _ in range(min(RECORDS_A_STEP, len(victim.others))):
            kind, number = next(iter(victim.others))
            if not space.in_force.stands_elsewhere(kind, number, victim.number):
                if kind in (RecordType.REMOVAL, RecordType.LOST):
                    self._put_gone_again(kind, number, victim)
                elif kind == RecordType.NAMESPACE:
                    self._store.put_namespace(*self._namespaces.record(number), reclaiming=True)
                else:
                    if kind == RecordType.WORKER:
                        self._store.put_worker(number, *workers.names[number], reclaiming=True)
                    generation, seq = workers.generation(number), workers.seq(number)
                    self._store.put_worker_mark(number, generation, seq, reclaiming=True)
            del victim.others[kind, number]
        self.bytes_rewritten += self._store.bytes_appended - before
        self._pace.spend(self._store.bytes_appended - before)

    def _put_gone_again(self, kind: int, number: int, victim: _Victim) -> None:
        """Put a removal, or what tells of a lost record, again while what it is about may stand in an older file."""
        listed = self._store.space.files.listed
        if victim.number == min(listed):
            needed = False
        elif kind == RecordType.REMOVAL:
            needed = self._state.table.describe(number) is None
        else:
            needed = number >> 48 != victim.number and number >> 48 in listed
        if not needed:
            self._store.space.in_force.end(kind, number)
        elif kind == RecordType.REMOVAL:
            self._store.put_removal_again(number)
        else:
            self._store.put_lost(number)
