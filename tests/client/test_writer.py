"""A worker's writer against a shard that fails in every way it may: order, numbers, and nothing lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.client import AsyncClient, NotNowError, RefusedError, UnreachableError
from sarp_cluster.client.attempts import RetryBudget
from sarp_cluster.client.errors import CallError, DeadlineError
from sarp_cluster.client.writer import WorkerWriter
from sarp_cluster.wire import messages
from tests.local_cluster import local_cluster

NAME = messages.WorkerName(worker="w", dp_rank=1)


def packed(*ids: int) -> bytes:
    return b"".join(one.to_bytes(8, "little") for one in ids)


def not_now(retry_after_ms: int | None = None) -> NotNowError:
    return NotNowError(
        messages.ErrorBody(code="no_lease", message="", outcome="not_applied", retry_after_ms=retry_after_ms)
    )


class Shard:
    """Holds what the index of a shard would, by one block ID a change, and obeys seqs as a shard does.

    `plan` says what befalls each message in turn: "apply"; "refuse" it; apply and "lose" the reply; apply it "later",
    after the next few messages.
    """

    def __init__(self, plan: Sequence[str] = ()) -> None:
        self.budget = RetryBudget()
        self.held: set[bytes] = set()
        self.highest = -1
        self.seen: list[tuple[str, bytes, int]] = []
        self.batches: list[int] = []
        self._plan = list(plan)
        self._late: list[messages.BatchItem] = []
        self.again: list[bool] = []

    def _apply(self, item: Any) -> messages.Reply:
        assert item.seq is not None
        name = "insert" if isinstance(item, messages.InsertRequest) else "remove"
        self.seen.append((name, item.block_ids, item.seq))
        new = item.seq > self.highest
        if new:
            self.highest = item.seq
            (self.held.add if name == "insert" else self.held.discard)(item.block_ids)
        if name == "insert":
            return messages.InsertReply(applied=new, durable=True, blocks_added=1, epoch=1)
        return messages.RemoveReply(applied=new, segments_changed=1, durable=True, epoch=1)

    def _take(self, item: Any) -> messages.Reply | CallError:
        fate = self._plan.pop(0) if self._plan else "apply"
        match fate:
            case "apply":
                return self._apply(item)
            case "refuse":
                return not_now()
            case "lose":
                self._apply(item)
                return DeadlineError("", change=True)
            case "later":
                # The message itself, as it was sent: the writer may give its own copy other numbers.
                copy = type(item)(**{name: getattr(item, name) for name in item.__struct_fields__})
                self._late.append(copy)
                return UnreachableError("", sent=True, change=True)
            case _:
                raise AssertionError(fate)

    def _arrive(self) -> None:
        if len(self._late) > 1 or (self._late and not self._plan):
            self._apply(self._late.pop(0))

    async def send(self, request: Any, *, again: bool = False) -> Any:
        self.again.append(again)
        result = self._take(request)
        self._arrive()
        if isinstance(result, CallError):
            raise result
        return result

    async def batch(self, items: Sequence[messages.BatchItem], *, again: bool = False) -> Sequence[Any]:
        self.again.append(again)
        self.batches.append(len(items))
        results = [self._take(item) for item in items]
        self._arrive()
        return results

    def all_arrive(self) -> None:
        while self._late:
            self._apply(self._late.pop())


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def writer_for(shard: Shard, **options: Any) -> WorkerWriter:
    return WorkerWriter(shard, NAME, sleep=no_pause, first_seq=0, **options)


CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=12)
FATES = st.lists(st.sampled_from(["apply", "refuse", "lose", "later"]), max_size=30)


@given(CHANGES, FATES, st.booleans())
async def test_what_is_held_in_the_end_is_what_the_changes_in_their_order_leave(
    changes: list[tuple[bool, int]], fates: list[str], one_by_one: bool
) -> None:
    shard = Shard(fates)
    expected: set[int] = set()
    async with writer_for(shard) as writer:
        waiting = []
        for insert, block in changes:
            (expected.add if insert else expected.discard)(block)
            change = writer.insert if insert else writer.remove
            if one_by_one:
                await change("n", block_ids=packed(block))
            else:
                waiting.append(asyncio.ensure_future(change("n", block_ids=packed(block))))
        await asyncio.gather(*waiting)
        assert writer.waiting == 0
    shard.all_arrive()
    assert shard.held == {packed(block) for block in expected}


async def test_a_change_is_answered_before_the_next_one_is_sent() -> None:
    shard = Shard(["refuse", "lose", "refuse", "apply", "apply"])
    async with writer_for(shard) as writer:
        assert (await writer.insert("n", block_ids=packed(1))).applied
        assert (await writer.remove("n", block_ids=packed(1))).segments_changed == 1
    kinds = [(name, ids) for name, ids, _ in shard.seen]
    assert kinds == [("insert", packed(1)), ("insert", packed(1)), ("remove", packed(1))]
    seqs = [seq for *_, seq in shard.seen]
    assert seqs == sorted(set(seqs)), "each attempt has a higher seq than all before"
    assert shard.again == [False, True, True, True, False]


async def test_changes_that_queue_up_go_in_batches_in_their_order() -> None:
    shard = Shard()
    count = 2 * limits.BATCH_ITEMS_MAX + 3
    async with writer_for(shard) as writer:
        await asyncio.gather(*(writer.insert("n", block_ids=packed(block)) for block in range(count)))
    assert [ids for _, ids, _ in shard.seen] == [packed(block) for block in range(count)]
    assert shard.batches == [limits.BATCH_ITEMS_MAX, limits.BATCH_ITEMS_MAX, 3]


async def test_a_batch_is_no_larger_than_a_body_may_be() -> None:
    shard = Shard()
    large = bytes(limits.WRITER_BATCH_BYTES_MAX // 16 * 8)
    async with writer_for(shard) as writer:
        await asyncio.gather(*(writer.insert("n", block_ids=large) for _ in range(5)))
    assert shard.batches == [2, 2]


async def test_an_item_that_may_be_tried_again_keeps_those_behind_it_from_counting_as_done() -> None:
    shard = Shard(["apply", "refuse", "apply", "apply"])
    async with writer_for(shard) as writer:
        ids = [packed(block) for block in range(4)]
        changes = [asyncio.ensure_future(writer.insert("n", block_ids=one)) for one in ids]
        await asyncio.gather(*changes)
    assert [one for _, one, _ in shard.seen] == [ids[0], ids[2], ids[3], ids[1], ids[2], ids[3]]
    assert shard.batches == [4, 3]


async def test_what_is_refused_for_good_does_not_stop_the_others() -> None:
    shard = Shard()
    real = shard._take

    def take(item: Any) -> Any:
        if item.block_ids == packed(1):
            return RefusedError(messages.ErrorBody(code="bad_request", message="", outcome="not_applied"))
        return real(item)

    shard._take = take  # type: ignore[method-assign]
    async with writer_for(shard) as writer:
        results = await asyncio.gather(
            *(writer.insert("n", block_ids=packed(block)) for block in range(3)), return_exceptions=True
        )
    assert [type(result) for result in results] == [messages.InsertReply, RefusedError, messages.InsertReply]


async def test_numbers_that_were_used_before_are_noticed() -> None:
    """Otherwise a change would be acknowledged that no shard applied."""
    shard = Shard()
    shard.highest = 5
    async with writer_for(shard) as writer:
        with pytest.raises(RefusedError) as caught:
            await writer.insert("n", block_ids=packed(1))
        assert (caught.value.code, caught.value.outcome) == ("seq_used", "not_applied")
        with pytest.raises(RefusedError) as caught:
            await writer.remove("n", block_ids=packed(1))
        assert (caught.value.code, caught.value.outcome) == ("seq_used", "not_applied")


async def test_a_pause_is_as_long_as_asked_for_and_grows() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    shard = Shard(["refuse"] * 12)
    writer = WorkerWriter(shard, NAME, sleep=sleep, first_seq=0, chance=lambda: 1.0)
    async with writer:
        await writer.insert("n", block_ids=packed(1))
    # Ten retries are saved up; behind them each pause is the longest.
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1, 1, 1, 1, 1]
    assert writer.retries == 12
    assert writer._pause_s(not_now(3_000), 1) == 3


async def test_who_stops_waiting_does_not_take_the_change_back() -> None:
    shard = Shard(["refuse"])
    async with writer_for(shard) as writer:
        change = asyncio.ensure_future(writer.insert("n", block_ids=packed(1)))
        await asyncio.sleep(0)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
    assert shard.held == {packed(1)}


async def test_more_changes_than_a_writer_keeps_wait_for_room() -> None:
    shard = Shard()
    writer = writer_for(shard)
    async with writer:
        changes = [
            asyncio.ensure_future(writer.insert("n", block_ids=packed(block)))
            for block in range(limits.WRITER_QUEUE_MAX + 10)
        ]
        await asyncio.sleep(0)
        assert writer.waiting == limits.WRITER_QUEUE_MAX
        await asyncio.gather(*changes)
    assert [ids for _, ids, _ in shard.seen] == [packed(block) for block in range(len(changes))]


async def test_an_error_that_nobody_expected_reaches_who_waits() -> None:
    shard = Shard(["no such fate"])
    with pytest.raises(AssertionError):
        async with writer_for(shard) as writer:
            await writer.insert("n", block_ids=packed(1))
    with pytest.raises(ValueError, match="closed"):
        await writer.insert("n", block_ids=packed(2))


async def test_an_error_in_the_block_ends_the_writer_with_its_changes() -> None:
    shard = Shard(["refuse"] * 1_000)
    changes: list[asyncio.Task[Any]] = []

    async def fail() -> None:
        async with writer_for(shard) as writer:
            changes.append(asyncio.ensure_future(writer.insert("n", block_ids=packed(1))))
            await asyncio.sleep(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with pytest.raises(asyncio.CancelledError):
        await changes[0]


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
async def test_a_real_cluster_holds_what_a_writer_wrote(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    directory: Path = tmp_path_factory.mktemp("cluster")
    async with (
        local_cluster(directory, shards=("s0", "s1")) as cluster,
        AsyncClient(cluster.urls("sarp")) as client,
        AsyncClient(cluster.urls("sarp"), direct=True) as direct,
    ):
        await client.register_worker("w")
        namespace = await direct.namespace("llama", hash_profile="opaque")
        sequences = [packed(*(rng.getrandbits(64) for _ in range(5))) for _ in range(6)]
        held = [0] * len(sequences)
        for sender in (client, direct):
            async with sender.writer("w") as writer:
                waiting: list[asyncio.Task[Any]] = []
                for _ in range(60):
                    number = rng.randrange(len(sequences))
                    if rng.random() < 0.6:
                        held[number] = 5
                        waiting.append(asyncio.ensure_future(writer.insert(namespace, block_ids=sequences[number])))
                    else:
                        first = rng.randrange(5)
                        held[number] = min(held[number], first)
                        waiting.append(
                            asyncio.ensure_future(writer.remove(namespace, block_ids=sequences[number], first=first))
                        )
                await asyncio.gather(*waiting)
            found = [await sender.match(namespace, block_ids=one, deadline_ms=5_000) for one in sequences]
            assert [one.matched_blocks for one in found] == held
