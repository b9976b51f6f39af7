"""Redis lies: it is lost, emptied, put back, stopped, full, read only, slow, locked, written by others.

Each over a real server. Whatever it says: nothing is built on what is not there any more, nothing is used that we did
not write, every call ends in time, and all goes on by itself when Redis is well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError

from sarp_cluster import limits
from sarp_cluster.cluster.membership import Records
from sarp_cluster.cluster.redis_address import connect, parse_redis_url
from sarp_cluster.cluster.redis_membership import RedisMembership
from sarp_cluster.cluster.registry import Entry, TenantEntry
from sarp_cluster.cluster.signed_records import FORMAT_VERSION, MAGIC, Signer
from sarp_cluster.cluster.slot_map import NONCE_BYTES, SlotMap
from sarp_cluster.errors import MembershipError, NotLeaderError, RecordsRejectedError
from tests.cluster.membership_backends import CLUSTER, SECRET
from tests.cluster.redis_server import RedisServer, redis_server
from tests.cluster.test_membership import FIRST, shard

IN_TIME_S = limits.MEMBERSHIP_TIMEOUT_MS / 1000 + 1
NONCE = bytes(range(NONCE_BYTES))
PREFIX = f"sarp:{{{CLUSTER}}}:"
LEADER, HEAD, SLOT_MAP, ENTRIES, SHARDS = (
    f"{PREFIX}{name}" for name in ("leader", "head", "slot_map", "entries", "shards")
)
EMPTY = Records(slot_map=None, number=0, entries=[], shards={})


def tenant(number: int) -> Entry:
    return TenantEntry(number, f"t{number}", 1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@contextlib.asynccontextmanager
async def opened(server: RedisServer, *, secret: bytes = SECRET) -> AsyncIterator[RedisMembership]:
    membership = RedisMembership(connect(parse_redis_url(server.url)), secret=secret, cluster=CLUSTER)
    try:
        yield membership
    finally:
        await membership.close()


@pytest.fixture
async def one(server: RedisServer) -> AsyncIterator[RedisMembership]:
    """A coordinator's, which leads and has put some records."""
    async with opened(server) as membership:
        assert await membership.lead("one")
        assert await membership.load() == EMPTY
        await membership.put_slot_map(FIRST, expected=None)
        await membership.put_entries([tenant(1), tenant(2)], 2)
        await membership.put_shard(shard("a"))
        yield membership


WRITTEN = Records(slot_map=FIRST, number=2, entries=[tenant(1), tenant(2)], shards={"a": shard("a")})


async def takes_up(membership: RedisMembership) -> Records:
    """The term has ended and the next one begins: what it finds."""
    assert not await membership.lead("one")
    assert await membership.lead("one")
    return await membership.load()


# --- two coordinators -------------------------------------------------------------------------------------------------


async def test_one_leads_and_the_other_may_not_write(server: RedisServer, one: RedisMembership) -> None:
    async with opened(server) as other:
        assert not await other.lead("other")
        for write in (other.put_shard(shard("b")), other.put_entries([tenant(3)], 3), other.discard(), other.load()):
            with pytest.raises(NotLeaderError):
                await write
        await one.resign()
        assert await other.lead("other")
        assert await other.load() == WRITTEN
        assert not await one.lead("one")


async def test_one_that_was_silent_too_long_is_followed_and_its_late_writes_are_refused(
    server: RedisServer, one: RedisMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEADER_LEASE_MS", 200)
    assert await one.lead("one")
    monkeypatch.undo()
    async with opened(server) as other:
        async with asyncio.timeout(5):
            while not await other.lead("other"):
                await asyncio.sleep(0.02)
        await other.load()
        for write in (
            one.put_slot_map(FIRST.changed(nonce=NONCE), expected=FIRST),
            one.put_entries([tenant(3)], 3),
            one.discard(),
        ):
            with pytest.raises(NotLeaderError):
                await write
        assert not await one.lead("one")
        assert not await one.lead("one")
        await other.put_entries([tenant(4)], 4)
        assert (await other.load()).entries == [tenant(1), tenant(2), tenant(4)]


async def test_of_many_that_begin_at_once_one_leads(server: RedisServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        many = [await stack.enter_async_context(opened(server)) for _ in range(8)]
        for _ in range(3):
            assert sum(await asyncio.gather(*(each.lead(f"{number}") for number, each in enumerate(many)))) == 1


async def test_a_renewal_and_writes_at_once_disturb_each_other_not(one: RedisMembership) -> None:
    async def write(number: int) -> None:
        await one.put_entries([tenant(number)], number)

    for number in range(3, 103, 4):
        answers = await asyncio.gather(*(write(number + more) for more in range(4)), one.lead("one"), one.lead("one"))
        assert answers[-2:] == [True, True]
    assert (await one.load()).number == 102


async def test_a_write_whose_answer_is_lost_ends_the_term_and_the_next_one_looks(
    one: RedisMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Pipeline.execute

    async def answer_lost(pipe: Pipeline, raise_on_error: bool = True) -> None:
        writes = pipe.explicit_transaction
        await execute(pipe, raise_on_error)
        if writes:
            raise RedisConnectionError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "execute", answer_lost)
        with pytest.raises(MembershipError):
            await one.put_entries([tenant(3)], 3)
        with pytest.raises(NotLeaderError):  # nothing is put on top of it
            await one.put_entries([tenant(4)], 4)
    assert (await takes_up(one)).entries == [tenant(1), tenant(2), tenant(3)]
    await one.put_entries([tenant(4)], 4)


# --- lost and put back ------------------------------------------------------------------------------------------------


async def test_killed_it_fails_in_time_and_back_with_all_it_had_the_term_goes_on(
    server: RedisServer, one: RedisMembership
) -> None:
    server.kill()
    for call in (one.lead("one"), one.put_shard(shard("b")), one.load()):
        began = time.monotonic()
        with pytest.raises(MembershipError):
            await call
        assert time.monotonic() - began < IN_TIME_S
    server.start()
    assert await one.lead("one")
    await one.put_entries([tenant(3)], 3)
    assert (await one.load()).entries == [tenant(1), tenant(2), tenant(3)]


async def test_restarted_empty_nothing_is_built_on_what_is_gone(server: RedisServer, one: RedisMembership) -> None:
    server.kill()
    server.forget()
    server.start()
    with pytest.raises(NotLeaderError):
        await one.put_entries([tenant(3)], 3)
    assert await takes_up(one) == EMPTY
    await one.put_slot_map(FIRST, expected=None)  # as the shards told it
    await one.put_entries([tenant(1), tenant(2), tenant(3)], 3)
    assert (await one.load()).number == 3


async def test_emptied_while_it_runs_the_leader_notices_by_itself(server: RedisServer, one: RedisMembership) -> None:
    server.command("FLUSHALL")
    assert await takes_up(one) == EMPTY


@pytest.mark.parametrize("first", ["renewal", "write"])
async def test_put_back_to_what_it_was_nothing_is_built_on_it(
    server: RedisServer, one: RedisMembership, first: str
) -> None:
    server.back_up("before")  # the leader's record is in it, too, and has not ended
    second = FIRST.changed(nonce=NONCE)
    await one.put_slot_map(second, expected=FIRST)
    await one.put_entries([tenant(3)], 3)
    server.kill()
    server.put_back("before")
    server.start()
    if first == "write":
        with pytest.raises(NotLeaderError):
            await one.put_entries([tenant(4)], 4)
    assert await takes_up(one) == WRITTEN  # older, and whole: the shards tell the rest
    await one.put_slot_map(second, expected=FIRST)
    await one.put_entries([tenant(3)], 3)
    assert (await one.load()).slot_map == second


# --- slow, full, read only, locked ------------------------------------------------------------------------------------


async def test_stopped_every_call_ends_in_time_and_none_is_done_later(
    server: RedisServer, one: RedisMembership
) -> None:
    server.signal(signal.SIGSTOP)
    for call in (one.lead("one"), one.put_entries([tenant(3)], 3)):
        began = time.monotonic()
        with pytest.raises(MembershipError):
            await call
        assert time.monotonic() - began < IN_TIME_S
    server.signal(signal.SIGCONT)
    assert await one.lead("one")
    assert await one.load() == WRITTEN
    await one.put_entries([tenant(4)], 4)


async def test_with_answers_too_late_calls_end_in_time(server: RedisServer, one: RedisMembership) -> None:
    server.command("CLIENT", "PAUSE", "60000", "ALL")
    began = time.monotonic()
    results = await asyncio.gather(
        one.lead("one"), one.put_shard(shard("b")), one.put_entries([tenant(3)], 3), return_exceptions=True
    )
    assert time.monotonic() - began < 2 * IN_TIME_S  # writes wait for one another
    assert all(isinstance(result, MembershipError) for result in results)
    server.kill()
    server.start()
    assert await one.lead("one")
    assert await one.load() == WRITTEN


async def test_without_memory_the_leader_leads_on_and_writes_are_refused(
    server: RedisServer, one: RedisMembership
) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1")
    for _ in range(2):
        with pytest.raises(MembershipError, match="refuses"):
            await one.put_entries([tenant(3)], 3)
        assert await one.lead("one")
    assert await one.load() == WRITTEN
    server.command("CONFIG", "SET", "maxmemory", "0")
    await one.put_entries([tenant(3)], 3)


async def test_what_was_thrown_out_for_want_of_memory_is_missed(server: RedisServer, one: RedisMembership) -> None:
    server.command("DEL", ENTRIES)  # as an eviction policy does
    with pytest.raises(RecordsRejectedError, match="not all there"):
        await one.load()
    await one.discard()
    assert await one.load() == EMPTY


async def test_a_replica_is_no_leaders_and_goes_on_when_it_is_promoted(
    server: RedisServer, one: RedisMembership
) -> None:
    server.command("REPLICAOF", "127.0.0.1", "1")
    for call in (one.lead("one"), one.put_shard(shard("b"))):
        with pytest.raises(MembershipError):
            await call
    server.command("REPLICAOF", "NO", "ONE")
    assert await one.lead("one")
    await one.put_shard(shard("b"))


async def test_with_a_wrong_password_it_is_told(server: RedisServer) -> None:
    address = parse_redis_url(server.url, "wrong")
    membership = RedisMembership(connect(address), secret=SECRET, cluster=CLUSTER)
    with pytest.raises(MembershipError, match="does not let us in"):
        await membership.lead("one")
    await membership.close()


async def test_the_documented_access_list_is_enough(server: RedisServer) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("user sarp ")]
    words = line.replace(">PASSWORD", ">secret").split()
    server.command("ACL", "SETUSER", *words[1:])
    url = f"redis://sarp:secret@127.0.0.1:{server.port}"
    membership = RedisMembership(connect(parse_redis_url(url)), secret=SECRET, cluster=CLUSTER)
    assert await membership.lead("one")
    await membership.put_slot_map(FIRST, expected=None)
    await membership.put_entries([tenant(1)], 1)
    await membership.put_shard(shard("a"))
    assert await membership.lead("one")
    assert (await membership.load()).number == 1
    await membership.discard()
    await membership.close()
    assert server.command("EXISTS", LEADER) == b"0"
    keys = {LEADER, HEAD, SLOT_MAP, ENTRIES, SHARDS}
    assert all(key.startswith("sarp:") for key in keys)


# --- written by others ------------------------------------------------------------------------------------------------


def copy(server: RedisServer, source: str, target: str) -> None:
    """A record of ours at another place of ours."""
    raw = server.command("GET", source)
    server.command("SET", target, raw)


def foreign(key: str, *, secret: bytes = b"the secret of somebody else") -> bytes:
    return Signer(secret, CLUSTER).seal(key, FIRST.changed(nonce=NONCE).packed())


POISON: dict[str, Callable[[RedisServer], object]] = {
    "no record of ours": lambda server: server.command("SET", SLOT_MAP, "http://elsewhere:1/"),
    "signed by others": lambda server: server.command("SET", SLOT_MAP, foreign(SLOT_MAP)),
    "unsigned": lambda server: server.command("SET", SLOT_MAP, MAGIC + b"1" + bytes(32) + b"\x80"),
    "ours, moved to another key": lambda server: copy(server, HEAD, SLOT_MAP),
    "ours, moved to another field": lambda server: server.command(
        "HSET", SHARDS, "b", server.command("HGET", SHARDS, "a")
    ),
    "a record too many": lambda server: server.command("HSET", ENTRIES, "x", "y"),
    "a record too few": lambda server: server.command("HDEL", ENTRIES, "tenant\0t1"),
    "too large": lambda server: server.command("HSET", ENTRIES, "tenant\0t1", bytes(1 << 20)),
    "another type": lambda server: (server.command("DEL", ENTRIES), server.command("SET", ENTRIES, "x")),
    "a map of another type": lambda server: (
        server.command("DEL", SLOT_MAP),
        server.command("HSET", SLOT_MAP, "x", ""),
    ),
    "no head": lambda server: server.command("DEL", HEAD),
    "a head of others": lambda server: server.command("SET", HEAD, "x"),
}


@pytest.mark.parametrize("what", sorted(POISON))
async def test_what_others_wrote_is_rejected_and_what_we_know_put_in_its_place(
    server: RedisServer, one: RedisMembership, what: str
) -> None:
    await one.resign()
    POISON[what](server)
    assert await one.lead("one")
    with pytest.raises(RecordsRejectedError, match="membership: "):
        await one.load()
    await one.discard()
    assert await one.load() == EMPTY
    await one.put_slot_map(FIRST, expected=None)
    await one.put_entries([tenant(1)], 1)
    assert (await one.load()).slot_map == FIRST


async def test_an_older_record_of_ours_among_newer_ones_is_rejected(server: RedisServer, one: RedisMembership) -> None:
    old = server.command("HGET", ENTRIES, "tenant\0t1")
    await one.put_entries([TenantEntry(3, "t1", 2)], 3)
    server.command("HSET", ENTRIES, "tenant\0t1", old)
    with pytest.raises(RecordsRejectedError, match="not of the same time"):
        await one.load()


async def test_a_poisoned_map_is_not_replaced_and_ends_the_term(server: RedisServer, one: RedisMembership) -> None:
    server.command("SET", SLOT_MAP, foreign(SLOT_MAP))
    with pytest.raises(RecordsRejectedError):
        await one.put_slot_map(FIRST.changed(nonce=NONCE), expected=FIRST)
    assert not await one.lead("one")


@pytest.mark.parametrize("what", ["no record of ours", "another type", "ours, without an end"])
async def test_nobody_else_can_keep_us_from_leading_for_ever(
    server: RedisServer, one: RedisMembership, what: str
) -> None:
    if what == "ours, without an end":
        server.command("PERSIST", LEADER)
    else:
        server.command("DEL", LEADER)
        server.command(*(("SET", LEADER, "x") if what == "no record of ours" else ("HSET", LEADER, "x", "")))
    async with opened(server) as other:
        assert not await other.lead("other")
        assert await other.lead("other")
        assert not await one.lead("one")


async def test_records_of_a_newer_program_are_left_alone(server: RedisServer, one: RedisMembership) -> None:
    newer = MAGIC + str(FORMAT_VERSION + 1).encode()
    signer = Signer(SECRET, CLUSTER)
    raw = newer + signer._signature(newer, SLOT_MAP, b"", b"\x80") + b"\x80"
    server.command("SET", SLOT_MAP, raw)
    with pytest.raises(MembershipError, match="version") as refused:
        await one.load()
    assert not isinstance(refused.value, RecordsRejectedError)


async def test_two_clusters_of_one_redis_know_nothing_of_each_other(server: RedisServer, one: RedisMembership) -> None:
    client = connect(parse_redis_url(server.url))
    other = RedisMembership(client, secret=b"another cluster's", cluster="fedcba9876543210")
    assert await other.lead("other")
    assert await other.load() == EMPTY
    await other.put_slot_map(SlotMap.first(["x"], NONCE), expected=None)
    assert await one.load() == WRITTEN
    await other.close()
