"""A shard's answers about blocks: match, insert, remove, batch (design §8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from sarp_cluster import limits
from sarp_cluster.cluster.leases import Lease
from sarp_cluster.cluster.placement import ID_BYTES
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.core.answering import MatchAnswer
from sarp_cluster.errors import (
    BadRequestError,
    ConflictError,
    DrainingError,
    NoLeaseError,
    OutcomeError,
    RecoveringError,
    RequestError,
    SarpError,
    SnapshotDamagedError,
)
from sarp_cluster.types import InsertResult, Tier, Worker
from sarp_cluster.wire import messages, planning
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.block_input import root_of, sequence, workers_of
from sarp_cluster.wire.codec import encode
from sarp_cluster.wire.eager import Begun
from sarp_cluster.wire.faults import reply_for
from sarp_cluster.wire.keyless import Keyless
from sarp_cluster.wire.service import Handler
from shard import match_path
from shard.index import Index
from shard.namespaces import IndexNamespace
from shard.ownership import Ownership
from shard.requests import check_integer, check_range, check_sequence

T = TypeVar("T")

ITEMS_A_TURN: Final = 16
"""Items of a batch that are done before others have their turn."""

LEARN: Final = 0.5
"""Of a request's time, what it may wait until this shard knows what its caller knows."""

Learn: TypeAlias = Callable[[int], Awaitable[None]]
"""Returns once this shard has a change without a key; who no longer waits for that cancels it."""

TIERS: Final = {name: Tier[name.upper()] for name in messages.TIER_NAMES}


class Blocks:
    """The handlers of requests that have a placement key."""

    def __init__(self, shard: str, view: ClusterView, keyless: Keyless, learn: Learn) -> None:
        self._view = view
        self._keyless = keyless
        self._learn = learn
        self._ownership = Ownership(shard, view)
        self.lease = Lease()
        self.index: Index | None = None
        """None until it is recovered and has caught up."""
        self.draining = False
        self.matches = 0
        self.matches_cut = 0
        """Of these, ended by their deadline."""
        self.inserts = 0
        self.removes = 0
        self._registry = view.registry
        self._namespaces: dict[str, IndexNamespace] = {}
        """By id, as that registry has them."""
        self._changing: set[asyncio.Task[Any]] = set()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By operation."""
        return {"match": self.match, "insert": self.insert, "remove": self.remove, "batch": self.batch}

    # --- what is asked ------------------------------------------------------------------------------------------------

    async def match(self, principal: Principal, request: messages.MatchRequest) -> messages.MatchReply:
        """Who holds the longest prefix?"""
        if request.number > self._view.number:
            await self._catch_up(request)
        return await self._match(principal, request)

    async def _match(self, principal: Principal, request: messages.MatchRequest) -> messages.MatchReply:
        index, namespace = self._find(principal, request)
        block_ids = sequence(request, namespace.spec)
        self._ownership.check(block_ids, namespace.key, request.position, request.epoch)
        self.matches += 1
        damaged = index.store.damaged_reads()
        matching = match_path.match(
            index.state,
            namespace,
            block_ids,
            detail=request.detail,
            tiers=None if request.tiers is None else [TIERS[name] for name in request.tiers],
            workers=workers_of(request),
            max_workers=request.max_workers,
        )
        try:
            begun = Begun(matching)
            answer = begun.result if begun.done else await begun.rest_within(request.deadline_ms / 1000)
        except TimeoutError:
            self.matches_cut += 1
            return planning.nothing("deadline", self._view.epoch)
        except SnapshotDamagedError:
            return planning.nothing("recovering", self._view.epoch)
        reply = self._reply(answer, namespace.spec.block_size)
        if index.store.damaged_reads() != damaged:  # by this match, or by one beside it while it waited
            reply.complete = False
            reply.degraded = ["quarantined"]
        return reply

    async def insert(self, principal: Principal, request: messages.InsertRequest) -> messages.InsertReply:
        """A worker newly holds blocks."""
        if request.number > self._view.number:
            await self._catch_up(request)
        return await self._insert(principal, request, request.durable)

    async def remove(self, principal: Principal, request: messages.RemoveRequest) -> messages.RemoveReply:
        """A worker no longer holds blocks."""
        if request.number > self._view.number:
            await self._catch_up(request)
        return await self._remove(principal, request, request.durable)

    async def _insert(
        self, principal: Principal, request: messages.InsertRequest, durable: bool
    ) -> messages.InsertReply:
        index, namespace = self._find(principal, request)
        worker = self._may_change(principal, request)
        block_ids = sequence(request, namespace.spec)
        if request.offset:
            root = root_of(request.root)
            if root is None:
                raise BadRequestError("root: an insert from an offset needs the first block's ID", field="root")
            end = request.position + request.offset + len(block_ids) // ID_BYTES
            self._ownership.check_tail(root, namespace.key, end, request.position, request.epoch)
        else:
            self._ownership.check(block_ids, namespace.key, request.position, request.epoch)
        self._check_more(request, namespace)
        self.inserts += 1
        added = 0

        async def insert() -> InsertResult:
            nonlocal added
            # The seq is kept with the last part: until then the change is not done, and comes again as a whole. Each
            # is compared with it: newer changes may have come while the one before waited for the disk.
            for part in request.more:
                result = await index.insert(
                    namespace,
                    part.block_ids,
                    worker=worker,
                    generation=request.generation,
                    tier=TIERS[request.tier],
                    first=part.first,
                    seq=request.seq,
                    handle=request.handle,
                    durable=False,
                    completes=False,
                )
                added += result.blocks_added
            return await index.insert(
                namespace,
                block_ids,
                worker=worker,
                generation=request.generation,
                tier=TIERS[request.tier],
                first=request.first,
                offset=request.offset,
                seq=request.seq,
                handle=request.handle,
                durable=durable,
            )

        result = await self._in_time(insert(), request.deadline_ms)
        self._may_acknowledge()
        return messages.InsertReply(
            applied=result.applied,
            durable=result.durable,
            blocks_added=result.blocks_added + added,
            epoch=self._view.epoch,
        )

    async def _remove(
        self, principal: Principal, request: messages.RemoveRequest, durable: bool
    ) -> messages.RemoveReply:
        index, namespace = self._find(principal, request)
        worker = self._may_change(principal, request)
        block_ids = sequence(request, namespace.spec)
        self._ownership.check(block_ids, namespace.key, request.position, request.epoch)
        self._check_more(request, namespace)
        self.removes += 1
        tier = None if request.tier is None else TIERS[request.tier]
        new = index.is_new(worker, request.generation, request.seq)

        async def remove() -> int:
            changed = 0
            for part in request.more:
                changed += await index.remove(
                    namespace,
                    part.block_ids,
                    worker=worker,
                    generation=request.generation,
                    tier=tier,
                    first=part.first,
                    last=part.last,
                    seq=request.seq,
                    durable=False,
                    completes=False,
                )
            return changed + await index.remove(
                namespace,
                block_ids,
                worker=worker,
                generation=request.generation,
                tier=tier,
                first=request.first,
                last=request.last,
                seq=request.seq,
                durable=durable,
            )

        changed = await self._in_time(remove(), request.deadline_ms)
        self._may_acknowledge()
        return messages.RemoveReply(applied=new, segments_changed=changed, durable=durable, epoch=self._view.epoch)

    async def batch(self, principal: Principal, request: messages.BatchRequest) -> messages.BatchReply:
        """Several, in their order. Its changes are made durable together, by one sync behind the last.

        Behind a change with a seq that was not done, or of which that is not known, its worker's further ones are not
        done: it may be sent again with that seq, and would be taken for a repetition.
        """
        replies: list[messages.Reply] = []
        unsynced: list[int] = []
        stopped: set[tuple[str, int]] = set()
        latest = max(request.items, key=lambda item: item.number)
        if latest.number > self._view.number:
            await self._catch_up(latest)  # once, for all of them
        for number, item in enumerate(request.items):
            if number % ITEMS_A_TURN == ITEMS_A_TURN - 1:
                await asyncio.sleep(0)
            change = not isinstance(item, messages.MatchRequest)
            try:
                principal.require("insert" if change else "match")
                if isinstance(item, messages.Change) and (item.worker, item.dp_rank) in stopped:
                    raise ConflictError("an earlier change of this worker was not done; send again from that one on")
                match item:
                    case messages.MatchRequest():
                        replies.append(await self._match(principal, item))
                    case messages.InsertRequest():
                        replies.append(await self._insert(principal, item, False))
                    case messages.RemoveRequest():
                        replies.append(await self._remove(principal, item, False))
            except SarpError as error:
                replies.append(reply_for(error, change=change))
                if isinstance(item, messages.Change) and item.seq is not None and not isinstance(error, RequestError):
                    stopped.add((item.worker, item.dp_rank))
            else:
                if not isinstance(item, messages.MatchRequest) and item.durable:
                    unsynced.append(number)
        if unsynced and self.index is not None:
            await self._sync(self.index, request, replies, unsynced)
        return messages.BatchReply(results=[msgspec.Raw(encode(reply)) for reply in replies])

    async def _sync(
        self, index: Index, request: messages.BatchRequest, replies: list[messages.Reply], unsynced: list[int]
    ) -> None:
        """Make these items durable, or say that it is not known whether they are."""
        try:
            await self._in_time(index.sync(), max(item.deadline_ms for item in request.items))
            self._may_acknowledge()
        except SarpError as error:
            for number in unsynced:
                reply = reply_for(error, change=True)
                reply.error.outcome = "unknown"
                replies[number] = reply
            return
        for number in unsynced:
            reply_to = replies[number]
            if isinstance(reply_to, messages.InsertReply | messages.RemoveReply):
                reply_to.durable = True

    async def _catch_up(self, request: messages.MatchRequest | messages.Change) -> None:
        """The caller knows of a change without a key that is on its way to this shard: that takes milliseconds."""
        learning = asyncio.ensure_future(self._learn(request.number))
        done, _ = await asyncio.wait([learning], timeout=request.deadline_ms / 1000 * LEARN)
        if not done:
            learning.cancel()

    # --- checks -------------------------------------------------------------------------------------------------------

    def _find(
        self, principal: Principal, request: messages.MatchRequest | messages.Change
    ) -> tuple[Index, IndexNamespace]:
        if self.index is None:
            raise RecoveringError("this shard is recovering")
        if request.number:
            self._ownership.check_number(request.number)
        registry = self._view.registry
        if registry is not self._registry:  # something has changed: a tenant may have been purged
            self._registry = registry
            self._namespaces = {}
        namespace = self._namespaces.get(request.namespace)
        if namespace is None or not (principal.is_node or namespace.spec.tenant == principal.tenant):
            entry = self._keyless.namespace(principal, request.namespace)
            namespace = self.index.create_namespace(entry.spec, registry.purges(entry.spec.tenant))
            self._namespaces[request.namespace] = namespace
        return self.index, namespace

    def _may_change(self, principal: Principal, request: messages.Change) -> Worker:
        worker = Worker(request.worker, request.dp_rank)
        self._keyless.own_worker(principal, worker)
        if self.draining:
            raise DrainingError("this shard is about to end; it takes no more changes")
        if not self.lease.valid(asyncio.get_running_loop().time()):
            raise NoLeaseError("this shard has no lease now; it takes changes again once a coordinator answers")
        return worker

    def _check_more(self, request: messages.Change, namespace: IndexNamespace) -> None:
        for part in request.more:
            # All of them before any is applied: then what is refused has changed nothing.
            count = len(check_sequence(part.block_ids)) // ID_BYTES
            last = count if part.last is None else check_integer(part.last, "last", count, lowest=1)
            check_range(part.first, 0, last, limits.SEGMENT_BLOCKS_MAX)
            self._ownership.check(part.block_ids, namespace.key, part.position, request.epoch)

    def _may_acknowledge(self) -> None:
        """After the disk has it: does the lease still hold? (design §7)"""
        if not self.lease.valid(asyncio.get_running_loop().time()):
            raise OutcomeError(
                "the lease ended while the change was written; repeat it", outcome="unknown", code="no_lease"
            )

    async def _in_time(self, change: Coroutine[Any, Any, T], deadline_ms: int) -> T:
        """The change's result. It is not cancelled when its time is over: it is whole, or not there at all."""
        begun = Begun(change)
        if begun.done:
            return begun.result
        task = asyncio.get_running_loop().create_task(begun.rest())
        self._changing.add(task)
        task.add_done_callback(self._changed)
        done, _ = await asyncio.wait([task], timeout=deadline_ms / 1000)
        if not done:
            raise OutcomeError(f"the change was not durable within {deadline_ms} ms; it may be yet", outcome="unknown")
        return task.result()

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changing.discard(task)
        if not task.cancelled():
            task.exception()  # who asked has been told, or no longer listens

    async def finish(self) -> None:
        """Until no change is under way."""
        while self._changing:
            await asyncio.wait(self._changing)

    # --- replies ------------------------------------------------------------------------------------------------------

    def _reply(self, answer: MatchAnswer, block_size: int) -> messages.MatchReply:
        matched = answer.matched_blocks
        found = answer.blocks
        return messages.MatchReply(
            matched_blocks=matched,
            matched_tokens=matched * block_size,
            workers=[
                messages.WorkerMatch(
                    worker=one.instance_id,
                    dp_rank=one.dp_rank,
                    gpu=one.gpu,
                    cpu=one.cpu,
                    ssd=one.ssd,
                    remote=one.remote,
                )
                for one in answer.workers
            ],
            truncated=answer.truncated,
            complete=True,
            degraded=[],
            epoch=self._view.epoch,
            blocks=None
            if found is None
            else [
                [
                    messages.Location(
                        worker=place.worker.instance_id,
                        dp_rank=place.worker.dp_rank,
                        tier=messages.TIER_NAMES[place.tier],
                        handle=place.handle,
                    )
                    for place in places
                ]
                for places in found
            ],
        )
