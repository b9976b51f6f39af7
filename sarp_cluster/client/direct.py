"""Straight to the shards, by slot map: what a router does, in the client (design §3 and §7).

It saves a hop and a process. A shard judges every request under its own map: one that was cut or sent by another is
refused as wrong_shard, never answered wrongly. Then the map, and the namespaces' keys, are fetched again, and the
request is planned anew, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sarp_cluster import limits
from sarp_cluster.client.attempts import Attempts
from sarp_cluster.client.errors import CallError, DeadlineError, NotNowError, RefusedError, UnreachableError, error_of
from sarp_cluster.client.requests import Namespace
from sarp_cluster.client.stream_transport import StreamTransport
from sarp_cluster.client.transport import SLICE, Credentials
from sarp_cluster.cluster.slot_map import FORMAT_VERSION, PackedSlotMap, SlotMap
from sarp_cluster.cluster.view import split_address
from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.wire import messages, planning
from sarp_cluster.wire.batching import Result, is_error, run_batch
from sarp_cluster.wire.block_input import sequence
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.operations import OPERATIONS

ATTEMPTS: Final = 2
"""Plans a request gets. The second is no retry: the shard refused the first before it did anything."""

LOOK_AGAIN_S: Final = 1.0
"""While a shard does not answer, its address is asked for so often at most."""


class Direct:
    """The shards. Matches, inserts, removals and batches go to them, everything else to the routers."""

    def __init__(self, routers: Attempts, credentials: Credentials) -> None:
        self._routers = routers
        self._credentials = credentials
        self._slot_map: SlotMap | None = None
        self._number = 0
        """Of the last change without a key that is known here: a shard that knows less must not answer yet."""
        self._shards: dict[str, tuple[tuple[str, int], StreamTransport]] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._fetched_at = float("-inf")

    async def close(self) -> None:
        """Let go of all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await asyncio.gather(*(transport.close() for _, transport in self._shards.values()))

    @property
    def epoch(self) -> int:
        """Of the slot map that is used; 0: none yet."""
        return 0 if self._slot_map is None else self._slot_map.epoch

    def learn(self, namespace: Namespace) -> None:
        """The newest that is known of a namespace."""
        self._namespaces[namespace.id] = namespace

    # --- the map ------------------------------------------------------------------------------------------------------

    async def _ready(self, namespaces: Sequence[str], ends: float) -> None:
        """Have a map, and the keys of these namespaces."""
        if self._slot_map is None or any(name not in self._namespaces for name in namespaces):
            await self._refresh(ends)

    async def _refresh(self, ends: float) -> None:
        """Fetch the map and the keys. All that wait share one try."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._fetch())
        left_s = ends - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait([self._refreshing], timeout=max(0.0, left_s))
        if not done:
            raise DeadlineError("the slot map was not there in time")
        self._refreshing.result()

    def _look_again(self) -> None:
        """A shard does not answer: it may have another address by now. Nobody waits for that."""
        idle = self._refreshing is None or self._refreshing.done()
        if idle and asyncio.get_running_loop().time() - self._fetched_at > LOOK_AGAIN_S:
            self._refreshing = asyncio.get_running_loop().create_task(self._fetch())
            self._refreshing.add_done_callback(_forget)

    async def _refreshed(self, ends: float) -> bool:
        """The same, where what the shards said tells more than why it failed."""
        try:
            await self._refresh(ends)
        except CallError:
            return False
        return True

    async def _fetch(self) -> None:
        self._fetched_at = asyncio.get_running_loop().time()
        deadline_ms = limits.CONTROL_DEADLINE_MS
        slots: messages.SlotsReply = await self._routers.ask("slots", messages.Empty(), deadline_ms)
        listed: messages.NamespaceList = await self._routers.ask("list_namespaces", messages.Empty(), deadline_ms)
        fetched = SlotMap.unpacked(
            PackedSlotMap(
                version=FORMAT_VERSION,
                epoch=slots.epoch,
                nonce=slots.nonce,
                shards=slots.shards,
                owners=slots.owners,
                splits=slots.splits,
            )
        )
        # A router that is behind must not take us back.
        if self._slot_map is None or fetched.epoch >= self._slot_map.epoch:
            self._slot_map = fetched
        self._number = max(self._number, slots.number)
        self._namespaces |= {one.namespace: Namespace(one) for one in listed.namespaces}
        for shard, places in slots.addresses.items():
            place = split_address(places.get("stream", ""))
            known = self._shards.get(shard)
            if place is None or (known is not None and known[0] == place):
                continue
            transport = StreamTransport(f"shard {shard}", place, self._credentials)
            self._shards[shard] = place, transport
            await transport.open()
            if known is not None:
                await known[1].close()

    def _map(self) -> SlotMap:
        if self._slot_map is None:
            raise NotNowError(messages.ErrorBody(code="unavailable", message="there is no slot map yet"))
        return self._slot_map

    def _find(self, name: str) -> tuple[Namespace, NamespaceKey]:
        namespace = self._namespaces.get(name)
        if namespace is None:
            message = "namespace: never created for this tenant; create it first"
            raise RefusedError(
                messages.ErrorBody(code="unknown_namespace", message=message, field="namespace", outcome="not_applied")
            )
        if namespace.key is None:
            message = "namespace: its key is not given to this credential; ask a router"
            raise RefusedError(messages.ErrorBody(code="forbidden", message=message, field="namespace"))
        return namespace, namespace.key

    # --- matches ------------------------------------------------------------------------------------------------------

    async def match(self, request: messages.MatchRequest, ends: float) -> messages.MatchReply:
        """The joined answer of the owners. Raises a CallError for what is the caller's fault."""
        await self._ready([request.namespace], ends)
        for attempt in range(ATTEMPTS):
            slot_map = self._map()
            namespace, key = self._find(request.namespace)
            pieces = planning.plan_match(sequence(request, namespace.spec), key, slot_map)
            alone = len(pieces) == 1
            answers = await asyncio.gather(
                *(self._ask(request, piece, slot_map, ends, alone=alone) for piece in pieces)
            )
            if "wrong_shard" in answers:
                if attempt + 1 < ATTEMPTS and not await self._refreshed(ends):
                    break
                continue
            known = [answer for answer in answers if answer != "wrong_shard"]
            if alone and isinstance(known[0], messages.MatchReply):
                return known[0]
            return planning.join_matches(request, pieces, known, namespace.block_size, slot_map.epoch)
        return planning.nothing("stale_map", self.epoch)

    async def _ask(
        self, request: messages.MatchRequest, piece: planning.MatchPiece, slot_map: SlotMap, ends: float, *, alone: bool
    ) -> Any:  # noqa: ANN401  # a MatchReply, a Reason, or "wrong_shard"
        left_s = ends - asyncio.get_running_loop().time()
        if left_s <= 0:
            return "deadline"
        deadline_ms = max(1, int(left_s * SLICE * 1000))
        sent = planning.match_request(
            request, piece, epoch=slot_map.epoch, number=self._number, deadline_ms=deadline_ms, alone=alone
        )
        try:
            return await self._shard(piece.stretch.shard).ask(OPERATIONS["match"], sent, left_s)
        except DeadlineError:
            return "shard_slow"
        except UnreachableError:
            self._look_again()
            return "shard_down"
        except CallError as error:
            return "wrong_shard" if error.code == "wrong_shard" else _reason(error)

    def _shard(self, shard: str) -> StreamTransport:
        known = self._shards.get(shard)
        if known is None:
            raise UnreachableError(f"shard {shard}: no address is known", sent=False, change=True)
        return known[1]

    # --- changes ------------------------------------------------------------------------------------------------------

    async def change(
        self, request: messages.InsertRequest | messages.RemoveRequest, ends: float
    ) -> messages.InsertReply | messages.RemoveReply:
        """The joined reply of the owners. Raises a CallError that says what is known of the outcome."""
        await self._ready([request.namespace], ends)
        name = "insert" if isinstance(request, messages.InsertRequest) else "remove"
        applied = 0
        failed: list[messages.ErrorBody] = []
        for attempt in range(ATTEMPTS):
            namespace, key = self._find(request.namespace)
            left_s = max(0.001, ends - asyncio.get_running_loop().time())
            deadline_ms = max(1, int(left_s * SLICE * 1000))
            block_ids = sequence(request, namespace.spec)
            pieces = planning.plan_change(
                request, block_ids, key, self._map(), number=self._number, deadline_ms=deadline_ms
            )
            results = await asyncio.gather(*(self._do(piece.shard, name, piece.request, left_s) for piece in pieces))
            errors = [result for result in results if isinstance(result, messages.ErrorBody)]
            if not errors:
                if isinstance(request, messages.InsertRequest):
                    return planning.join_inserts(results)
                return planning.join_removes(results)
            applied += len(results) - len(errors)
            failed = errors + failed
            if all(error.code != "wrong_shard" for error in errors):
                break
            if not await self._refreshed(ends) or attempt + 1 == ATTEMPTS:
                break
            if not planning.may_go_on(request, applied, errors):
                break
        raise error_of(planning.joined_outcome(applied, failed))

    async def _do(self, shard: str, name: str, request: messages.Request, left_s: float) -> Any:  # noqa: ANN401
        """A shard's reply, or the ErrorBody that stands for it."""
        try:
            return await self._shard(shard).ask(OPERATIONS[name], request, left_s)
        except CallError as error:
            if isinstance(error, UnreachableError):
                self._look_again()
            return error.body

    # --- batches ------------------------------------------------------------------------------------------------------

    async def batch(self, request: messages.BatchRequest, ends: float) -> list[Result]:
        """The results of the items, in their order."""
        await self._ready([item.namespace for item in request.items], ends)

        async def alone(item: messages.BatchItem) -> Result:
            if isinstance(item, messages.MatchRequest):
                return await self.match(item, ends)
            return await self.change(item, ends)

        return await run_batch(request.items, self._place, lambda shard, items: self._send(shard, items, ends), alone)

    def _place(self, item: messages.BatchItem) -> tuple[str, messages.BatchItem] | messages.MatchReply | None:
        slot_map = self._map()
        namespace, key = self._find(item.namespace)
        block_ids = sequence(item, namespace.spec)
        if isinstance(item, messages.MatchRequest):
            pieces = planning.plan_match(block_ids, key, slot_map)
            if not pieces:
                return planning.nothing(None, slot_map.epoch)
            if len(pieces) > 1:
                return None
            return pieces[0].stretch.shard, planning.match_request(
                item, pieces[0], epoch=slot_map.epoch, number=self._number, deadline_ms=item.deadline_ms, alone=True
            )
        changes = planning.plan_change(
            item, block_ids, key, slot_map, number=self._number, deadline_ms=item.deadline_ms
        )
        if len(changes) > 1:
            return None
        return changes[0].shard, changes[0].request

    async def _send(
        self, shard: str, batch: Sequence[tuple[int, messages.BatchItem]], ends: float
    ) -> Mapping[int, Result]:
        left_s = max(0.001, ends - asyncio.get_running_loop().time())
        answer = await self._do(shard, "batch", messages.BatchRequest(items=[item for _, item in batch]), left_s)
        if isinstance(answer, messages.ErrorBody):
            return {number: _failed(item, error_of(answer)) for number, item in batch}
        results: dict[int, Result] = {}
        for (number, item), raw in zip(batch, answer.results, strict=True):
            if not is_error(raw):
                results[number] = raw
                continue
            error = error_of(decode(raw, messages.ErrorReply).error)
            if error.code != "wrong_shard":
                results[number] = _failed(item, error)
        if len(results) < len(batch):
            await self._refreshed(ends)
        return results


def _forget(task: asyncio.Task[None]) -> None:
    """Whoever waits for it gets its error; often nobody does."""
    if not task.cancelled():
        task.exception()


def _reason(error: CallError) -> messages.Reason:
    """Why a match that a shard did not answer is shorter. Raises the error where it is the caller's fault."""
    reason = planning.REASONS.get(error.code)
    if reason is None and isinstance(error, RefusedError):
        raise error
    return reason or "shard_down"


def _failed(item: messages.BatchItem, error: CallError) -> Result:
    """The result of an item that its shard did not do."""
    if isinstance(item, messages.MatchRequest):
        try:
            return planning.nothing("shard_slow" if error.code == "timeout" else _reason(error), 0)
        except RefusedError:
            pass
    return messages.ErrorReply(error=error.body)
