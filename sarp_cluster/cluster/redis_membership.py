"""Membership in Redis: several coordinators, of which one leads (design §7, decision 0011).

Keys, all of them in one slot of a Redis Cluster: `sarp:{<cluster id>}:` and

    leader    who leads: a random token of one term, with an end
    head      number of the registry, and a digest of all records below
    slot_map  the slot map
    entries   hash: an entry of the registry a field
    shards    hash: a shard that has joined a field

Redis may forget, go back to what it was, or be written by others, so:
  R1  every record is signed for its place, and no other is used;
  R2  every write is one transaction with the head, and happens only if this term's token and the head that this term
      wrote or read last are there: nothing builds on what was lost, replaced or written by another coordinator;
  R3  a write of which it is not known whether it was done ends the term. The next one takes another token first, after
      which the write cannot be done any more, and reads;
  R4  the digest of what is read is that of the head: all records are there, and all are of the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, WatchError

from sarp_cluster import limits
from sarp_cluster.cluster.membership import Records, ShardRecord
from sarp_cluster.cluster.redis_calls import RedisCalls, not_done, redis_call
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, Registry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.signed_records import Digest, Signer
from sarp_cluster.cluster.slot_map import PackedSlotMap, SlotMap
from sarp_cluster.errors import EpochConflictError, MembershipError, NotLeaderError, RecordsRejectedError

logger: Final = logging.getLogger(__name__)

ATTEMPTS: Final = 8
"""Times that a write is begun again because our own renewal came in between."""
SCAN_COUNT: Final = 1_000
"""Fields that are read at once."""
GONE: Final = -2
"""What PTTL says of a key that is not there."""


class _Leader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    coordinator: str
    token: bytes


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    number: int
    digest: bytes
    nonce: bytes
    """Of this write: no two heads are the same."""


_leader_decoder: Final = msgspec.msgpack.Decoder(_Leader)
_head_decoder: Final = msgspec.msgpack.Decoder(_Head)
_map_decoder: Final = msgspec.msgpack.Decoder(PackedSlotMap)
_entry_decoder: Final[msgspec.msgpack.Decoder[Entry]] = msgspec.msgpack.Decoder(Entry)
_shard_decoder: Final = msgspec.msgpack.Decoder(ShardRecord)


class _Put(NamedTuple):
    """A record that is to be written."""

    key: str
    field: bytes
    """Empty: the key holds one record."""
    before: bytes | None
    after: bytes


_Plan: TypeAlias = Callable[[Pipeline], Awaitable[tuple[list[_Put], int]]]
"""Reads what it has to, over a connection that watches the head, and says what to put and the registry's number."""


class _State(NamedTuple):
    """What stands in Redis, as this term wrote or read it last."""

    head: bytes | None
    number: int
    digest: Digest


class RedisMembership:
    """See Membership."""

    def __init__(self, client: Redis, *, secret: bytes, cluster: str) -> None:
        self._redis = RedisCalls(client)
        self._signer = Signer(secret, cluster)
        prefix = f"sarp:{{{cluster}}}:"
        self._leader, self._head = f"{prefix}leader", f"{prefix}head"
        self._slot_map, self._entries, self._shards = f"{prefix}slot_map", f"{prefix}entries", f"{prefix}shards"
        self._held: bytes | None = None
        """Our leader's record, while this term lasts."""
        self._wanted: bytes | None = None
        """The one we try to enter, or tried: whether it was may not be known."""
        self._ended: bytes | None = None
        """Of a term that has ended here; `lead` has not said so yet."""
        self._state: _State | None = None
        """None: nothing was read in this term."""
        self._heads: set[bytes | None] | None = None
        """Heads that a renewal under way may see."""
        self._writing_head: bytes | None = None
        """The one that a write under way puts there."""
        self._writing = asyncio.Lock()  # one write or reading at a time; each of their calls is bounded

    # --- leading ------------------------------------------------------------------------------------------------------

    async def lead(self, coordinator: str) -> bool:
        """See Membership.lead."""
        async with redis_call("whether we lead"):
            if self._ended is not None:
                ended, self._ended = self._ended, None
                with contextlib.suppress(MembershipError, RedisError, OSError):
                    await self._redis.take_away(self._leader, ended)
                return False
            return await (self._acquire(coordinator) if self._held is None else self._renew(self._held))

    async def _acquire(self, coordinator: str) -> bool:
        if self._wanted is None:
            token = _Leader(coordinator=coordinator, token=secrets.token_bytes(16))
            self._wanted = self._signer.seal(self._leader, token)
        wanted = self._wanted
        if not await self._redis.one("SET", self._leader, wanted, "NX", "PX", limits.LEADER_LEASE_MS):
            there = await self._leader_there()
            # Ours: an earlier attempt, unanswered. Nobody else's ends there, so what is prolonged is ours.
            if there != wanted or not await self._redis.one("PEXPIRE", self._leader, limits.LEADER_LEASE_MS):
                return False
            if await self._leader_there() != wanted:
                return False
        self._held, self._wanted, self._state = wanted, None, None
        return True

    async def _leader_there(self) -> bytes | None:
        """The leader's record, if it is one: what nobody of us can have written is taken away."""
        raw: bytes | None = None
        try:
            raw, left_ms = await self._redis.read(("GET", self._leader), ("PTTL", self._leader))
            if raw is None or left_ms == GONE:
                return None
            self._signer.open(self._leader, raw, _leader_decoder, bytes_max=limits.MEMBERSHIP_RECORD_BYTES_MAX)
            if not 0 <= left_ms <= limits.LEADER_LEASE_MS:
                raise RecordsRejectedError(f"membership: {self._leader}: it would last for ever, or too long")
        except RecordsRejectedError as error:
            logger.error("%s: taken away", error)
            await (self._redis.one("DEL", self._leader) if raw is None else self._redis.take_away(self._leader, raw))
            return None
        return raw

    async def _renew(self, held: bytes) -> bool:
        heads = self._heads = {None if self._state is None else self._state.head, self._writing_head}
        try:
            # No transaction: those are refused when memory is short, and prolonging what is there takes none. If it is
            # ours before and after, it was ours all the time, since no token is ever entered twice.
            before, head, _, after = await self._redis.read(
                ("GET", self._leader),
                ("GET", self._head),
                ("PEXPIRE", self._leader, limits.LEADER_LEASE_MS),
                ("GET", self._leader),
            )
            same = self._state is None or head in heads
        except RecordsRejectedError as error:
            logger.error("%s", error)
            same, before, after = False, held, None
        finally:
            self._heads = None
        if self._held != held:
            pass  # a write has ended the term meanwhile
        elif before != held or after != held:
            self._end("another coordinator leads, or Redis has forgotten that we do")
        elif not same:
            self._end("the records in Redis are not those that we wrote last: lost, gone back, or written by others")
        else:
            return True
        self._ended = None  # said at once
        with contextlib.suppress(MembershipError, RedisError, OSError):
            await self._redis.take_away(self._leader, held)
        return False

    def _end(self, why: str) -> None:
        """The term is over, whatever others think."""
        if self._held is not None:
            logger.warning("membership: %s: this term has ended", why)
            self._ended, self._held, self._state = self._held, None, None

    async def resign(self) -> None:
        """See Membership.resign."""
        held = self._held or self._ended or self._wanted
        self._held = self._ended = self._wanted = self._state = None
        if held is not None:
            async with redis_call("resigning"):
                await self._redis.take_away(self._leader, held)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def load(self) -> Records:
        """See Membership.load. Only the leader may: nobody writes meanwhile."""
        async with self._writing:
            try:
                async with asyncio.timeout(limits.MEMBERSHIP_LOAD_TIMEOUT_MS / 1000):
                    return await self._load()
            except TimeoutError as error:
                raise MembershipError("membership: the records are not read in time") from error

    async def _load(self) -> Records:
        held = self._held
        if held is None:
            raise NotLeaderError("another coordinator leads")
        async with redis_call("the records"):
            leader, head, raw_map, entries, shards = await self._redis.read(
                ("GET", self._leader),
                ("GET", self._head),
                ("GET", self._slot_map),
                ("HLEN", self._entries),
                ("HLEN", self._shards),
            )
        if entries > limits.MEMBERSHIP_RECORDS_MAX or shards > limits.SHARDS_MAX:
            raise RecordsRejectedError(f"membership: {entries} entries and {shards} shards are more than there can be")
        digest = self._signer.digest()
        slot_map = self._opened_map(raw_map)
        if raw_map is not None:
            digest = digest.changed(None, raw_map)
        registry, places = Registry(), {}
        async for field, raw in self._scan(self._entries):
            digest = digest.changed(None, raw)
            registry.apply([self._opened(self._entries, raw, _entry_decoder, field)])
        async for field, raw in self._scan(self._shards):
            digest = digest.changed(None, raw)
            record = self._opened(self._shards, raw, _shard_decoder, field)
            places[record.shard] = record
        number = registry.number
        if head is not None:
            opened = self._opened(self._head, head, _head_decoder)
            number = max(number, opened.number)
            if opened.digest != digest.seal():
                raise RecordsRejectedError("membership: the records are not all there, or not of the same time")
        elif digest.count:
            raise RecordsRejectedError("membership: there are records, and no head")
        async with redis_call("the records"):
            again = await self._redis.read(("GET", self._leader), ("GET", self._head))
        if leader != held or again != [held, head] or self._held != held:
            self._end("another coordinator leads, or has written, while the records were read")
            raise NotLeaderError("another coordinator leads")
        self._state = _State(head, number, digest)
        return Records(slot_map=slot_map, number=number, entries=registry.entries(), shards=places)

    def _opened(self, key: str, raw: bytes, decoder: msgspec.msgpack.Decoder[Any], field: bytes = b"") -> Any:  # noqa: ANN401  # what the decoder gives
        bytes_max = limits.MEMBERSHIP_MAP_BYTES_MAX if key == self._slot_map else limits.MEMBERSHIP_RECORD_BYTES_MAX
        return self._signer.open(key, raw, decoder, bytes_max=bytes_max, field=field)

    def _opened_map(self, raw: bytes | None) -> SlotMap | None:
        if raw is None:
            return None
        packed = self._opened(self._slot_map, raw, _map_decoder)
        try:
            return SlotMap.unpacked(packed)
        except ValueError as error:
            raise RecordsRejectedError(f"membership: {self._slot_map}: signed, and makes no sense: {error}") from error

    async def _scan(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """Every field of a hash once."""
        cursor: int = 0
        seen: set[bytes] = set()
        while True:
            async with redis_call("the records"):
                answer = await self._redis.read(("HSCAN", key, cursor, "COUNT", SCAN_COUNT))
            cursor, page = answer[0]
            for field, raw in page.items():
                if field not in seen:  # Redis may tell some twice
                    seen.add(field)
                    yield field, raw
            if not int(cursor):
                return

    # --- writing ------------------------------------------------------------------------------------------------------

    async def put_slot_map(self, slot_map: SlotMap, *, expected: SlotMap | None) -> None:
        """See Membership.put_slot_map."""

        async def plan(pipe: Pipeline) -> tuple[list[_Put], int]:
            raw = cast(bytes | None, await pipe.get(self._slot_map))
            there = self._opened_map(raw)
            if there != expected:
                epoch = None if there is None else there.epoch
                raise EpochConflictError(f"epoch: the map that is there ({epoch}) is not the one expected")
            return [_Put(self._slot_map, b"", raw, self._signer.seal(self._slot_map, slot_map.packed()))], 0

        await self._write(plan)

    async def put_entries(self, entries: list[Entry], number: int) -> None:
        """See Membership.put_entries."""
        ordered = sorted(entries, key=lambda entry: entry.number)
        size = limits.MEMBERSHIP_ENTRIES_A_WRITE
        # In the order of their numbers, so that what is there in between is what the registry was at that number.
        for start in range(0, max(1, len(ordered)), size):
            some = ordered[start : start + size]
            last = number if start + size >= len(ordered) else some[-1].number
            await self._write(lambda pipe, some=some, last=last: self._plan_entries(pipe, some, last))  # type: ignore[misc]

    async def _plan_entries(self, pipe: Pipeline, entries: Sequence[Entry], number: int) -> tuple[list[_Put], int]:
        newest = {_field(entry): entry for entry in entries}
        there = await self._fields(pipe, self._entries, newest)
        puts = []
        for (field, entry), raw in zip(newest.items(), there, strict=True):
            if raw is None or self._opened(self._entries, raw, _entry_decoder, field).number < entry.number:
                puts.append(_Put(self._entries, field, raw, self._signer.seal(self._entries, entry, field)))
        return puts, number

    async def put_shard(self, record: ShardRecord) -> None:
        """See Membership.put_shard."""
        field = record.shard.encode()

        async def plan(pipe: Pipeline) -> tuple[list[_Put], int]:
            [raw] = await self._fields(pipe, self._shards, [field])
            if raw is not None:
                self._opened(self._shards, raw, _shard_decoder, field)
            return [_Put(self._shards, field, raw, self._signer.seal(self._shards, record, field))], 0

        await self._write(plan)

    @staticmethod
    async def _fields(pipe: Pipeline, key: str, fields: Iterable[bytes]) -> list[bytes | None]:
        names = list(fields)
        return list(await cast(Any, pipe.hmget(key, names))) if names else []

    async def _write(self, plan: _Plan) -> None:
        async with self._writing:
            try:
                if self._held is not None and self._state is None:
                    await self._load()
                async with redis_call("a record"):
                    await self._try(plan)
            except RecordsRejectedError:
                self._end("the records in Redis are not ours")
                raise

    async def _try(self, plan: _Plan) -> None:
        lost = False
        for _ in range(ATTEMPTS):
            try:
                return await self._transaction(plan)
            except WatchError:
                continue  # our own renewal came in between: look again
            except RedisConnectionError:
                if lost or self._held is None:
                    raise
                lost = True  # before anything was done: it was of before a restart
        raise MembershipError("membership: the records change all the time")

    async def _transaction(self, plan: _Plan) -> None:
        async with self._redis.pipeline() as pipe:
            held, state = await self._fenced(pipe)
            puts, number = await plan(pipe)
            number = max(number, state.number)
            if not puts and number == state.number:
                return
            digest = state.digest
            for put in puts:
                digest = digest.changed(put.before, put.after)
            head = _Head(number=number, digest=digest.seal(), nonce=secrets.token_bytes(16))
            after = _State(self._signer.seal(self._head, head), number, digest)
            pipe.multi()  # type: ignore[no-untyped-call]
            for put in puts:
                where = ("HSET", put.key, put.field) if put.field else ("SET", put.key)
                pipe.execute_command(*where, put.after)
            pipe.execute_command("SET", self._head, after.head)
            await self._execute(pipe, held, after)

    async def discard(self) -> None:
        """See Membership.discard."""
        async with self._writing, redis_call("the records"), self._redis.pipeline() as pipe:
            await pipe.watch(self._leader)
            held = self._held
            if held is None or await pipe.get(self._leader) != held:
                self._end("another coordinator leads")
                raise NotLeaderError("another coordinator leads")
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.execute_command("DEL", self._head, self._slot_map, self._entries, self._shards)
            await self._execute(pipe, held, _State(None, 0, self._signer.digest()))

    async def _fenced(self, pipe: Pipeline) -> tuple[bytes, _State]:
        """Watch that nobody else leads, and that what we wrote last is what is there (R2)."""
        held, state = self._held, self._state
        if held is None or state is None:
            raise NotLeaderError("another coordinator leads")
        await pipe.watch(self._leader, self._head)
        leader, head = await cast(Any, pipe.mget(self._leader, self._head))
        if leader != held:
            self._end("another coordinator leads, or Redis has forgotten that we do")
            raise NotLeaderError("another coordinator leads")
        if head != state.head:
            self._end("the records in Redis are not those that we wrote last: lost, gone back, or written by others")
            raise NotLeaderError("the records were lost: they have to be read from the shards first")
        return held, state

    async def _execute(self, pipe: Pipeline, held: bytes, after: _State) -> None:
        self._writing_head = after.head
        if self._heads is not None:
            self._heads.add(after.head)
        try:
            await pipe.execute()
        except BaseException as error:  # whatever it is, cancellation too: it is raised
            if not not_done(error):
                self._end("it is not known whether a write was done")  # R3
            raise
        finally:
            self._writing_head = None
        if self._held == held:
            self._state = after

    async def close(self) -> None:
        """See Membership.close."""
        try:
            with contextlib.suppress(MembershipError):
                await self.resign()
        finally:
            await self._redis.close()


def _field(entry: Entry) -> bytes:
    """Where an entry stands in the hash: one of a thing."""
    match entry:
        case NamespaceEntry():
            return b"namespace\0" + entry.id.encode()
        case WorkerEntry():
            return b"worker\0%d\0" % entry.dp_rank + entry.instance_id.encode()
        case TenantEntry():
            return b"tenant\0" + entry.tenant.encode()
