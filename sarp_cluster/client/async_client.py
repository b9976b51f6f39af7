"""The client for asyncio: `async with AsyncClient("http://127.0.0.1:7100") as client: ...` (design §3)."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from sarp_cluster import limits
from sarp_cluster.client.attempts import Attempts, RetryBudget
from sarp_cluster.client.direct import Direct
from sarp_cluster.client.errors import CallError, DeadlineError, RefusedError, error_of
from sarp_cluster.client.match_batches import MatchBatches
from sarp_cluster.client.requests import (
    Integers,
    Namespace,
    WorkerLike,
    insert_request,
    match_request,
    remove_request,
    worker_name,
)
from sarp_cluster.client.transport import Credentials, open_transports, parse_addresses
from sarp_cluster.client.writer import WorkerWriter
from sarp_cluster.errors import RequestError
from sarp_cluster.types import Event, HashProfile
from sarp_cluster.wire import control, messages, planning
from sarp_cluster.wire.batching import is_error
from sarp_cluster.wire.codec import decode
from sarp_cluster.wire.faults import describe

logger: Final = logging.getLogger(__name__)

T = TypeVar("T")
Change: TypeAlias = messages.InsertRequest | messages.RemoveRequest
BatchResult: TypeAlias = messages.MatchReply | messages.InsertReply | messages.RemoveReply | CallError


class AsyncClient:
    """A client of one cluster, for one credential and one tenant.

    `url`: addresses of routers, separated by commas; the next one is asked when one fails. http:// and https:// take
    the HTTP wire, sarp:// and sarps:// the stream; with TLS all, or none. `direct`: matches and changes go straight to
    the shards, by slot map; the streams of these must be reachable. `batch_matches`: matches asked for in the same turn
    of the loop go as one batch. `tls`: whom to trust, in place of the system's authorities.

    Every call has a deadline, in which its retries are. It raises a CallError (see sarp_cluster.client.errors).
    """

    def __init__(
        self,
        url: str,
        *,
        credential: str = "",
        tenant: str = "",
        direct: bool = False,
        batch_matches: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        addresses = parse_addresses(url)
        if not addresses[0].secure:
            tls = None
        elif tls is None:
            tls = ssl.create_default_context()
        credentials = Credentials(credential, tenant, tls)
        self.budget = RetryBudget()
        self._routers = Attempts(open_transports(addresses, credentials, tls), self.budget)
        self._direct = Direct(self._routers, credentials) if direct else None
        self._batches = MatchBatches(self._routers) if batch_matches and not direct else None

    async def __aenter__(self) -> AsyncClient:
        await self._routers.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._batches is not None:
            await self._batches.close()
        if self._direct is not None:
            await self._direct.close()
        await self._routers.close()

    # --- blocks -------------------------------------------------------------------------------------------------------

    async def namespace(
        self,
        model: str,
        *,
        lora: str = "",
        salt: str = "",
        block_size: int = 16,
        hash_profile: HashProfile | str = HashProfile.XXH3,
    ) -> Namespace:
        """The namespace of all this, created if it is not there yet (and the credential may insert)."""
        request = messages.NamespaceRequest(
            model=model, lora=lora, salt=salt, block_size=block_size, hash_profile=HashProfile(hash_profile)
        )
        try:
            reply = await self._ask("create_namespace", request)
        except RefusedError as error:
            if error.code != "forbidden":
                raise
            listed: messages.NamespaceList = await self._ask("list_namespaces", messages.Empty())
            found = [one for one in listed.namespaces if _is(one, request)]
            if not found:
                raise
            reply = found[0]
        namespace = Namespace(reply)
        if self._direct is not None:
            self._direct.learn(namespace)
        return namespace

    async def match(
        self,
        namespace: Namespace | str,
        *,
        tokens: Integers | None = None,
        block_ids: Integers | None = None,
        detail: str = "workers",
        tiers: Iterable[messages.TierName] | None = None,
        workers: Iterable[WorkerLike] | None = None,
        max_workers: int | None = None,
        deadline_ms: int = limits.MATCH_DEADLINE_MS,
    ) -> messages.MatchReply:
        """The longest prefix of these tokens, or blocks, that somebody holds, and who does.

        Never longer than what is there. Shorter, and not `complete`, when an owner did not answer in time: `degraded`
        says why. Raises a CallError when the request is refused or no router can be reached.
        """
        request = match_request(
            namespace,
            tokens=tokens,
            block_ids=block_ids,
            detail=detail,
            tiers=tiers,
            workers=workers,
            max_workers=max_workers,
            deadline_ms=deadline_ms,
        )
        try:
            if self._direct is not None:
                return await self._told(self._direct.match(request, self._ends(deadline_ms)))
            if self._batches is not None:
                return await self._batches.match(request)
            reply: messages.MatchReply = await self._routers.ask("match", request, deadline_ms)
            return reply
        except DeadlineError:
            return planning.nothing("deadline", 0)

    async def insert(
        self,
        namespace: Namespace | str,
        *,
        worker: WorkerLike,
        tokens: Integers | None = None,
        block_ids: Integers | None = None,
        generation: int = 0,
        tier: messages.TierName = "gpu",
        first: int = 0,
        offset: int = 0,
        root: bytes | int | None = None,
        seq: int | None = None,
        handle: int | None = None,
        durable: bool = True,
        deadline_ms: int = limits.INSERT_DEADLINE_MS,
    ) -> messages.InsertReply:
        """The worker newly holds the blocks from position `first` to the end of this sequence.

        Sent once: of an error, `outcome` says what is known. A `writer` sends again until it is answered.
        """
        request = insert_request(
            namespace,
            worker=worker,
            tokens=tokens,
            block_ids=block_ids,
            generation=generation,
            tier=tier,
            first=first,
            offset=offset,
            root=root,
            seq=seq,
            handle=handle,
            durable=durable,
            deadline_ms=deadline_ms,
        )
        reply: messages.InsertReply = await self.send(request)
        return reply

    async def remove(
        self,
        namespace: Namespace | str,
        *,
        worker: WorkerLike,
        tokens: Integers | None = None,
        block_ids: Integers | None = None,
        generation: int = 0,
        tier: messages.TierName | None = None,
        first: int = 0,
        last: int | None = None,
        seq: int | None = None,
        durable: bool = True,
        deadline_ms: int = limits.INSERT_DEADLINE_MS,
    ) -> messages.RemoveReply:
        """The worker no longer holds positions [first, last) of this sequence. Sent once, as `insert`."""
        request = remove_request(
            namespace,
            worker=worker,
            tokens=tokens,
            block_ids=block_ids,
            generation=generation,
            tier=tier,
            first=first,
            last=last,
            seq=seq,
            durable=durable,
            deadline_ms=deadline_ms,
        )
        reply: messages.RemoveReply = await self.send(request)
        return reply

    async def send(self, request: Change, *, again: bool = False) -> Any:  # noqa: ANN401  # InsertReply or RemoveReply
        """Send one change, once. `again`: a retry, whose budget was taken."""
        if self._direct is not None:
            if not again:
                self.budget.request()
            return await self._told(self._direct.change(request, self._ends(request.deadline_ms)), change=True)
        name = "insert" if isinstance(request, messages.InsertRequest) else "remove"
        return await self._routers.ask(name, request, request.deadline_ms, again=again)

    async def batch(
        self, items: Sequence[messages.BatchItem], *, deadline_ms: int | None = None, again: bool = False
    ) -> list[BatchResult]:
        """Several matches, inserts and removals: each its own reply, or the CallError that it would have raised.

        Items for one shard run in their order, in no order across shards, and not as a whole. Make them with
        `match_request`, `insert_request` and `remove_request` of sarp_cluster.client.
        """
        request = messages.BatchRequest(items=list(items))
        if deadline_ms is None:
            deadline_ms = max((item.deadline_ms for item in items), default=limits.INSERT_DEADLINE_MS)
        if self._direct is not None:
            if not again:
                self.budget.request()
            results = await self._told(self._direct.batch(request, self._ends(deadline_ms)), change=True)
        else:
            reply: messages.BatchReply = await self._routers.ask("batch", request, deadline_ms, again=again)
            results = list(reply.results)
        return [_read(item, result) for item, result in zip(items, results, strict=True)]

    @asynccontextmanager
    async def writer(
        self, worker: WorkerLike, *, generation: int = 0, first_seq: int | None = None
    ) -> AsyncIterator[WorkerWriter]:
        """Numbers a worker's changes, and sends each until it is answered. One writer a worker, in one process.

        `first_seq`: of its first change; above all that were used in this generation (None: the time in microseconds,
        which is, as long as the clock does not go back).
        """
        writer = WorkerWriter(self, worker_name(worker), generation=generation, first_seq=first_seq)
        async with writer:
            yield writer

    # --- workers ------------------------------------------------------------------------------------------------------

    async def register_worker(self, worker: WorkerLike, *, heartbeat_ttl_ms: int = 0) -> messages.WorkerReply:
        """Register a worker for this credential. The same again is fine. With a TTL it has to send heartbeats."""
        name = worker_name(worker)
        request = messages.RegisterRequest(worker=name.worker, dp_rank=name.dp_rank, heartbeat_ttl_ms=heartbeat_ttl_ms)
        return await self._ask("register_worker", request)  # type: ignore[no-any-return]

    async def heartbeat(self, *workers: WorkerLike) -> None:
        """These workers are there."""
        await self._ask("heartbeat", messages.HeartbeatRequest(workers=[worker_name(one) for one in workers]))

    @asynccontextmanager
    async def heartbeats(self, *workers: WorkerLike, interval_s: float = 1.0) -> AsyncIterator[None]:
        """Send heartbeats for these workers as long as the block lasts. One that fails is logged; the next may not."""

        async def beat() -> None:
            while True:
                try:
                    await self.heartbeat(*workers)
                except CallError as error:
                    logger.warning("no heartbeat: %s", error)
                await asyncio.sleep(interval_s)

        task = asyncio.get_running_loop().create_task(beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def clear_worker(self, worker: WorkerLike, *, generation: int | None = None) -> messages.WorkerReply:
        """All that the worker held is gone: its cache was cleared, or its engine started anew. The reply has its
        generation from now on."""
        name = worker_name(worker)
        request = messages.ClearRequest(worker=name.worker, dp_rank=name.dp_rank, generation=generation)
        return await self._ask("clear_worker", request)  # type: ignore[no-any-return]

    async def drain_worker(self, worker: WorkerLike) -> messages.WorkerReply:
        """Leave the worker out of answers from now on."""
        return await self._ask("drain_worker", worker_name(worker))  # type: ignore[no-any-return]

    async def deregister_worker(self, worker: WorkerLike) -> messages.WorkerReply:
        """The worker will not come back; what it held is gone."""
        return await self._ask("deregister_worker", worker_name(worker))  # type: ignore[no-any-return]

    async def workers(self) -> list[messages.WorkerReply]:
        """This credential's workers; all for an admin."""
        reply: messages.WorkerList = await self._ask("list_workers", messages.Empty())
        return reply.workers

    # --- the cluster --------------------------------------------------------------------------------------------------

    async def cluster(self) -> messages.ClusterReply:
        """The cluster as its coordinator sees it."""
        return await self._ask("cluster", messages.Empty())  # type: ignore[no-any-return]

    async def slots(self) -> messages.SlotsReply:
        """The slot map, and where its shards are."""
        return await self._ask("slots", messages.Empty())  # type: ignore[no-any-return]

    async def events(self, *, after: int = 0, limit: int = 256) -> list[Event]:
        """What happened after an event's number, oldest first."""
        reply: messages.EventList = await self._ask("events", messages.EventsRequest(after=after, limit=limit))
        return reply.events

    async def snapshot_shard(self, shard: str, *, deadline_ms: int = limits.DEADLINE_MS_MAX) -> None:
        """Have a shard take a snapshot; returns when it is there."""
        await self._ask("snapshot_shard", control.ShardCommand(shard=shard), deadline_ms)

    async def recover_shard(self, shard: str, *, deadline_ms: int = limits.CONTROL_DEADLINE_MS) -> None:
        """Have a shard's process started again."""
        await self._ask("recover_shard", control.ShardCommand(shard=shard), deadline_ms)

    async def drain_shard(self, shard: str, *, deadline_ms: int = limits.DEADLINE_MS_MAX) -> None:
        """Have a shard refuse changes, finish, take a snapshot, and end."""
        await self._ask("drain_shard", control.ShardCommand(shard=shard), deadline_ms)

    async def purge_tenant(self, tenant: str) -> int:
        """All blocks of a tenant are gone. Returns how often it was purged."""
        reply: messages.PurgeReply = await self._ask("purge_tenant", control.PurgeTenant(tenant=tenant))
        return reply.purges

    # --- what all need ------------------------------------------------------------------------------------------------

    async def _ask(self, name: str, message: messages.Request, deadline_ms: int = limits.CONTROL_DEADLINE_MS) -> Any:  # noqa: ANN401  # the operation's reply
        return await self._routers.ask(name, message, deadline_ms)

    @staticmethod
    def _ends(deadline_ms: int) -> float:
        return asyncio.get_running_loop().time() + deadline_ms / 1000

    @staticmethod
    async def _told(planned: Awaitable[T], *, change: bool = False) -> T:
        """What it returns. What planning refuses is told as a node would tell it."""
        try:
            return await planned
        except RequestError as error:
            raise RefusedError(describe(error, change=change)) from error


def _is(known: messages.NamespaceReply, wanted: messages.NamespaceRequest) -> bool:
    """Is this the namespace?"""
    names = ("model", "lora", "salt", "block_size", "hash_profile")
    return all(getattr(known, name) == getattr(wanted, name) for name in names)


def _read(item: messages.BatchItem, result: Any) -> BatchResult:  # noqa: ANN401  # Raw, or a message of its own
    if not isinstance(result, msgspec.Raw):
        return error_of(result.error) if isinstance(result, messages.ErrorReply) else result
    if is_error(result):
        return error_of(decode(result, messages.ErrorReply).error)
    match item:
        case messages.MatchRequest():
            return decode(result, messages.MatchReply)
        case messages.InsertRequest():
            return decode(result, messages.InsertReply)
        case messages.RemoveRequest():
            return decode(result, messages.RemoveReply)
