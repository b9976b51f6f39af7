"""A router's answers about blocks: cut, forward, join (design §7 and §8).

A match is never refused for what happens behind the router: it gets shorter, and says why. A change gets a prompt error
that says what is known of its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec

from router.forwarding import Links
from sarp_cluster import limits
from sarp_cluster.cluster.slot_map import SlotMap
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.errors import BadRequestError, RecoveringError, UnknownNamespaceError, UnknownWorkerError
from sarp_cluster.types import NamespaceSpec, Worker
from sarp_cluster.wire import messages, planning
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.batching import is_error, run_batch
from sarp_cluster.wire.block_input import check_handle, sequence
from sarp_cluster.wire.codec import decode, encode
from sarp_cluster.wire.faults import RemoteError, reply_for
from sarp_cluster.wire.keyless import Keyless
from sarp_cluster.wire.service import Handler

SLICE: Final = 0.9
"""Of what is left of a deadline, what the shard has: the rest is for the way back and for joining."""
ATTEMPTS: Final = 2
"""Plans a request gets: another one when a shard says that the first was by an old map."""

T = TypeVar("T")

Refresh: TypeAlias = Callable[[], Awaitable[None]]
"""A shard judged by another map than ours: fetch what is newer, if there is anything. Returns soon in any case."""
Change: TypeAlias = messages.InsertRequest | messages.RemoveRequest


class Blocks:
    """The handlers of requests that have a placement key."""

    def __init__(self, view: ClusterView, secret: bytes, keyless: Keyless, links: Links, refresh: Refresh) -> None:
        self._view = view
        self._secret = secret
        self._keyless = keyless
        self._links = links
        self._refresh = refresh
        self._keys: dict[str, tuple[int, NamespaceKey]] = {}
        self.matches = 0
        self.changes = 0

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By operation."""
        return {"match": self.match, "insert": self.insert, "remove": self.remove, "batch": self.batch}

    # --- matches ------------------------------------------------------------------------------------------------------

    async def match(self, principal: Principal, request: messages.MatchRequest) -> messages.MatchReply | msgspec.Raw:
        """Who holds the longest prefix? The reply of a shard that owns it all is passed on as it is."""
        ends = asyncio.get_running_loop().time() + request.deadline_ms / 1000
        spec, key = await self._informed(lambda: self._find(principal, request))
        block_ids = sequence(request, spec)
        self.matches += 1
        if not block_ids:
            return planning.nothing(None, self._view.epoch)
        for attempt in range(ATTEMPTS):
            slot_map = self._map()
            pieces = planning.plan_match(block_ids, key, slot_map)
            try:
                if len(pieces) == 1:
                    answer = await self._ask(request, pieces[0], slot_map, ends, alone=True)
                    return answer if isinstance(answer, msgspec.Raw) else planning.nothing(answer, slot_map.epoch)
                answers = await asyncio.gather(
                    *(self._ask(request, piece, slot_map, ends, alone=False) for piece in pieces)
                )
            except RemoteError as error:
                if error.code != "wrong_shard":
                    raise
                if attempt + 1 < ATTEMPTS:
                    await self._refresh()
                continue
            read = [one if isinstance(one, str) else decode(one, messages.MatchReply) for one in answers]
            return planning.join_matches(request, pieces, read, spec.block_size, slot_map.epoch)
        return planning.nothing(self._links.count("stale_map"), self._view.epoch)

    async def _ask(
        self, request: messages.MatchRequest, piece: planning.MatchPiece, slot_map: SlotMap, ends: float, *, alone: bool
    ) -> msgspec.Raw | messages.Reason:
        left_s = ends - asyncio.get_running_loop().time()
        deadline_ms = max(1, int(left_s * SLICE * 1000))
        sent = planning.match_request(
            request, piece, epoch=slot_map.epoch, number=self._view.number, deadline_ms=deadline_ms, alone=alone
        )
        return await self._links.match(piece.stretch.shard, sent, left_s)

    # --- changes ------------------------------------------------------------------------------------------------------

    async def insert(self, principal: Principal, request: messages.InsertRequest) -> messages.Reply | msgspec.Raw:
        """A worker newly holds blocks."""
        return await self._change(principal, request, "insert")

    async def remove(self, principal: Principal, request: messages.RemoveRequest) -> messages.Reply | msgspec.Raw:
        """A worker no longer holds blocks."""
        return await self._change(principal, request, "remove")

    async def _change(self, principal: Principal, request: Change, name: str) -> messages.Reply | msgspec.Raw:
        ends = asyncio.get_running_loop().time() + request.deadline_ms / 1000
        block_ids, key = await self._informed(lambda: self._prepare(principal, request))
        self.changes += 1
        applied = 0
        failed: list[messages.ErrorBody] = []
        """The newest first: what is not known of the first attempt is not known at all."""
        for attempt in range(ATTEMPTS):
            left_s = max(0.001, ends - asyncio.get_running_loop().time())
            deadline_ms = max(1, int(left_s * SLICE * 1000))
            pieces = planning.plan_change(
                request, block_ids, key, self._map(), number=self._view.number, deadline_ms=deadline_ms
            )
            if len(pieces) == 1:
                results = [await self._links.change(pieces[0].shard, name, pieces[0].request, left_s)]
            else:
                results = await asyncio.gather(
                    *(self._links.change(piece.shard, name, piece.request, left_s) for piece in pieces)
                )
            errors = [result for result in results if isinstance(result, messages.ErrorBody)]
            if not errors:
                replies = [result for result in results if isinstance(result, msgspec.Raw)]
                if len(replies) == 1:
                    return replies[0]
                if name == "insert":
                    return planning.join_inserts([decode(reply, messages.InsertReply) for reply in replies])
                return planning.join_removes([decode(reply, messages.RemoveReply) for reply in replies])
            applied += len(results) - len(errors)
            failed = errors + failed
            if all(error.code != "wrong_shard" for error in errors):
                break
            await self._refresh()
            if attempt + 1 == ATTEMPTS or not planning.may_go_on(request, applied, errors):
                break
        raise RemoteError(planning.joined_outcome(applied, failed))

    def _prepare(self, principal: Principal, request: Change) -> tuple[bytes, NamespaceKey]:
        """Block IDs and key of a change, after all that can be checked here."""
        spec, key = self._find(principal, request)
        self._keyless.own_worker(principal, Worker(request.worker, request.dp_rank))
        if request.more:
            raise BadRequestError("more: only a router gives it, to a shard", field="more")
        check_handle(request)
        block_ids = sequence(request, spec)
        if not block_ids:
            raise BadRequestError("block_ids: empty; a change names at least one block", field="block_ids")
        return block_ids, key

    # --- batches ------------------------------------------------------------------------------------------------------

    async def batch(self, principal: Principal, request: messages.BatchRequest) -> messages.BatchReply:
        """Several at once: the items of a shard go to it together, in their order."""
        if not all(map(self._known, request.items)):
            await self._refresh()
        results = await run_batch(
            request.items,
            lambda item: self._plan_item(principal, item, self._map()),
            lambda shard, batch: self._send_batch(shard, batch, request),
            lambda item: self._by_itself(principal, item),
        )
        return messages.BatchReply(
            results=[one if isinstance(one, msgspec.Raw) else msgspec.Raw(encode(one)) for one in results]
        )

    def _known(self, item: messages.BatchItem) -> bool:
        """Are the names in it known here?"""
        registry = self._view.registry
        if item.namespace not in registry.namespaces:
            return False
        return isinstance(item, messages.MatchRequest) or Worker(item.worker, item.dp_rank) in registry.workers

    def _plan_item(
        self, principal: Principal, item: messages.BatchItem, slot_map: SlotMap
    ) -> tuple[str, messages.BatchItem] | messages.MatchReply | None:
        """Which shard does this item, as what; None: more than one does. A match of nothing is answered here."""
        principal.require("match" if isinstance(item, messages.MatchRequest) else "insert")
        if isinstance(item, messages.MatchRequest):
            spec, key = self._find(principal, item)
            block_ids = sequence(item, spec)
            self.matches += 1
            if not block_ids:
                return planning.nothing(None, slot_map.epoch)
            pieces = planning.plan_match(block_ids, key, slot_map)
            if len(pieces) > 1:
                return None
            deadline_ms = max(1, int(item.deadline_ms * SLICE))
            return pieces[0].stretch.shard, planning.match_request(
                item, pieces[0], epoch=slot_map.epoch, number=self._view.number, deadline_ms=deadline_ms, alone=True
            )
        block_ids, key = self._prepare(principal, item)
        deadline_ms = max(1, int(item.deadline_ms * SLICE))
        changes = planning.plan_change(
            item, block_ids, key, slot_map, number=self._view.number, deadline_ms=deadline_ms
        )
        if len(changes) > 1:
            return None
        self.changes += 1
        return changes[0].shard, changes[0].request

    async def _send_batch(
        self, shard: str, batch: Sequence[tuple[int, messages.BatchItem]], request: messages.BatchRequest
    ) -> Mapping[int, messages.Reply | msgspec.Raw]:
        """Ask a shard for its items; what was planned by an old map is left without a result."""
        numbers = [number for number, _ in batch]
        items = [item for _, item in batch]
        deadline_s = max(request.items[number].deadline_ms for number in numbers) / 1000
        answer = await self._links.change(shard, "batch", messages.BatchRequest(items=items), deadline_s)
        if isinstance(answer, messages.ErrorBody):
            return {number: self._failed(request.items[number], answer) for number in numbers}
        results: dict[int, messages.Reply | msgspec.Raw] = {}
        for number, raw in zip(numbers, decode(answer, messages.BatchReply).results, strict=True):
            if not is_error(raw):
                results[number] = raw
                continue
            error = decode(raw, messages.ErrorReply).error
            if error.code != "wrong_shard":
                results[number] = self._failed(request.items[number], error)
        if len(results) < len(numbers):
            await self._refresh()
        return results

    def _failed(self, item: messages.BatchItem, error: messages.ErrorBody) -> messages.Reply:
        """The result of an item that its shard did not do."""
        if not isinstance(item, messages.MatchRequest):
            return messages.ErrorReply(error=error)
        try:
            reason = "shard_slow" if error.code == "timeout" else planning.match_reason(error)
        except RemoteError as refused:
            return reply_for(refused)
        return planning.nothing(self._links.count(reason), self._view.epoch)

    async def _by_itself(self, principal: Principal, item: messages.BatchItem) -> messages.Reply | msgspec.Raw:
        match item:
            case messages.MatchRequest():
                return await self.match(principal, item)
            case messages.InsertRequest():
                return await self.insert(principal, item)
            case messages.RemoveRequest():
                return await self.remove(principal, item)

    # --- what both need -----------------------------------------------------------------------------------------------

    async def _informed(self, look: Callable[[], T]) -> T:
        """What `look` finds; where it does not know a name, again after asking for news: another router may have it
        since a moment."""
        try:
            return look()
        except (UnknownNamespaceError, UnknownWorkerError):
            await self._refresh()
            return look()

    def _find(
        self, principal: Principal, request: messages.MatchRequest | Change
    ) -> tuple[NamespaceSpec, NamespaceKey]:
        entry = self._keyless.namespace(principal, request.namespace)
        if request.position:
            raise BadRequestError("position: a router is asked for whole sequences", field="position")
        purges = self._view.registry.purges(entry.spec.tenant)
        known = self._keys.get(entry.id)
        if known is None or known[0] != purges:
            key = NamespaceKey(derive_namespace_key(self._secret, entry.spec, purges))
            known = self._keys[entry.id] = purges, key
        return entry.spec, known[1]

    def _map(self) -> SlotMap:
        if self._view.slot_map is None:
            raise RecoveringError("this router has no slot map yet", retry_after_ms=limits.HEARTBEAT_MS)
        return self._view.slot_map
