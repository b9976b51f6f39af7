"""Namespaces, workers and tenants as callers see them: what any node answers from its view, or has changed by the
coordinator (design §6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from sarp_cluster import limits
from sarp_cluster.cluster.registry import Entry, NamespaceEntry, TenantEntry, WorkerEntry
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.core.namespace import derive_namespace_id, derive_namespace_key
from sarp_cluster.errors import (
    BadRequestError,
    ConnectionLostError,
    ForbiddenError,
    OutcomeError,
    UnavailableError,
    UnknownNamespaceError,
    UnknownWorkerError,
)
from sarp_cluster.types import NamespaceSpec, Worker
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.service import Handler
from sarp_cluster.wire.stream_client import Peer

CALL_TIMEOUT_S: Final = limits.CHANGE_TIMEOUT_MS / 1000 + 2


class Keyless:
    """The handlers of everything that has no placement key."""

    def __init__(
        self,
        view: ClusterView,
        secret: bytes,
        coordinator: Peer,
        enter: Callable[[Entry], Awaitable[None]],
        *,
        silent: Callable[[Worker], bool] = lambda _: False,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._view = view
        self._secret = secret
        self._coordinator = coordinator
        self._enter = enter
        self._silent = silent
        self._refresh = refresh
        """Asks for news, where a name is not known."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By operation."""
        return {
            "create_namespace": self.create_namespace,
            "list_namespaces": self.list_namespaces,
            "register_worker": self.register_worker,
            "clear_worker": self.clear_worker,
            "drain_worker": self.drain_worker,
            "deregister_worker": self.deregister_worker,
            "list_workers": self.list_workers,
            "purge_tenant": self.purge_tenant,
        }

    # --- namespaces ---------------------------------------------------------------------------------------------------

    def namespace(self, principal: Principal, name: str) -> NamespaceEntry:
        """The namespace of an id. One of another tenant is not there."""
        entry = self._view.registry.namespaces.get(name)
        if entry is None or not (principal.is_node or entry.spec.tenant == principal.for_tenant()):
            raise UnknownNamespaceError(
                "namespace: never created for this tenant; create it first (POST /v1/namespaces)", field="namespace"
            )
        return entry

    async def create_namespace(
        self, principal: Principal, request: messages.NamespaceRequest
    ) -> messages.NamespaceReply:
        """Create a namespace, or find it."""
        for field in ("model", "lora", "salt"):
            check_name(getattr(request, field), field)
        spec = request.spec(principal.for_tenant())
        name = derive_namespace_id(self._secret, spec)
        if name not in self._view.registry.namespaces:
            await self._change(
                control.NewNamespace(
                    id=name,
                    tenant=spec.tenant,
                    model=spec.model,
                    lora=spec.lora,
                    salt=spec.salt,
                    block_size=spec.block_size,
                    hash_profile=spec.hash_profile,
                )
            )
        return self._describe(name, spec)

    async def list_namespaces(self, principal: Principal, _: messages.Empty) -> messages.NamespaceList:
        """The namespaces of the caller's tenant."""
        tenant = principal.for_tenant()
        entries = self._view.registry.namespaces.values()
        return messages.NamespaceList(
            namespaces=[self._describe(entry.id, entry.spec) for entry in entries if entry.spec.tenant == tenant]
        )

    def _describe(self, name: str, spec: NamespaceSpec) -> messages.NamespaceReply:
        return messages.NamespaceReply(
            namespace=name,
            model=spec.model,
            lora=spec.lora,
            salt=spec.salt,
            block_size=spec.block_size,
            hash_profile=spec.hash_profile,
            key=derive_namespace_key(self._secret, spec, self._view.registry.purges(spec.tenant)),
        )

    # --- workers ------------------------------------------------------------------------------------------------------

    def own_worker(self, principal: Principal, worker: Worker) -> WorkerEntry:
        """A worker that was registered, by this caller. A node has checked its callers itself."""
        entry = self._view.registry.workers.get(worker)
        if entry is None or entry.gone:
            raise UnknownWorkerError(
                f"worker: {worker.instance_id!r} rank {worker.dp_rank} is not registered; register it first "
                "(POST /v1/workers/register)",
                field="worker",
            )
        if not principal.is_node and entry.owner != principal.name:
            raise ForbiddenError(
                f"worker: {worker.instance_id!r} rank {worker.dp_rank} belongs to another credential", field="worker"
            )
        return entry

    async def own_worker_informed(self, principal: Principal, worker: Worker) -> WorkerEntry:
        """As `own_worker`; one that is not known here may be known elsewhere since a moment."""
        try:
            return self.own_worker(principal, worker)
        except UnknownWorkerError:
            if self._refresh is None:
                raise
            await self._refresh()
            return self.own_worker(principal, worker)

    async def register_worker(self, principal: Principal, request: messages.RegisterRequest) -> messages.WorkerReply:
        """Register a worker, or find it."""
        check_name(request.worker, "worker")
        worker = Worker(request.worker, request.dp_rank)
        known = self._view.registry.workers.get(worker)
        if known is not None and not known.gone and not known.draining:
            self.own_worker(principal, worker)
            if known.heartbeat_ttl_ms == request.heartbeat_ttl_ms:
                return self._worker(known)
        return await self._change_worker(
            control.NewWorker(worker=_name(worker), owner=principal.name, heartbeat_ttl_ms=request.heartbeat_ttl_ms)
        )

    async def clear_worker(self, principal: Principal, request: messages.ClearRequest) -> messages.WorkerReply:
        """All that a worker held is gone."""
        worker = Worker(request.worker, request.dp_rank)
        await self.own_worker_informed(principal, worker)
        return await self._change_worker(control.ClearWorker(worker=_name(worker), generation=request.generation))

    async def drain_worker(self, principal: Principal, request: messages.WorkerName) -> messages.WorkerReply:
        """Leave a worker out of answers."""
        return await self._retire(principal, request, gone=False)

    async def deregister_worker(self, principal: Principal, request: messages.WorkerName) -> messages.WorkerReply:
        """A worker will not come back; what it held is gone."""
        return await self._retire(principal, request, gone=True)

    async def _retire(self, principal: Principal, request: messages.WorkerName, gone: bool) -> messages.WorkerReply:
        worker = Worker(request.worker, request.dp_rank)
        await self.own_worker_informed(principal, worker)
        return await self._change_worker(control.RetireWorker(worker=_name(worker), gone=gone))

    async def list_workers(self, principal: Principal, _: messages.Empty) -> messages.WorkerList:
        """The caller's workers; all of them for an admin."""
        every = "admin" in principal.scopes
        entries = self._view.registry.workers.values()
        listed = [self._worker(entry) for entry in entries if every or entry.owner == principal.name]
        return messages.WorkerList(workers=listed[: limits.WORKERS_LISTED_MAX])

    def _worker(self, entry: WorkerEntry) -> messages.WorkerReply:
        state: messages.WorkerState = "live"
        if entry.gone:
            state = "gone"
        elif entry.draining:
            state = "draining"
        elif self._silent(entry.worker):
            state = "silent"
        return messages.WorkerReply(
            worker=entry.instance_id,
            dp_rank=entry.dp_rank,
            generation=entry.generation,
            heartbeat_ttl_ms=entry.heartbeat_ttl_ms,
            state=state,
        )

    # --- tenants ------------------------------------------------------------------------------------------------------

    async def purge_tenant(self, principal: Principal, request: control.PurgeTenant) -> messages.PurgeReply:
        """All blocks of a tenant are gone."""
        if request.tenant not in principal.tenants and not principal.is_node:
            raise ForbiddenError(f"tenant: not one of the credential {principal.name!r}", field="tenant")
        entry = await self._change(request)
        purges = entry.purges if isinstance(entry, TenantEntry) else 0
        return messages.PurgeReply(tenant=request.tenant, purges=purges)

    # --- the coordinator ----------------------------------------------------------------------------------------------

    async def _change_worker(self, change: control.KeylessChange) -> messages.WorkerReply:
        entry = await self._change(change)
        if not isinstance(entry, WorkerEntry):
            raise ConnectionLostError("the coordinator's answer is about something else")
        return self._worker(entry)

    async def _change(self, change: control.KeylessChange) -> Entry:
        """Have a change numbered and spread; returns once every serving shard has it durably."""
        sent = self._coordinator.connected
        try:
            reply = await self._coordinator.call(
                "change", control.ChangeRequest(change=change), control.ChangeReply, CALL_TIMEOUT_S
            )
        except TimeoutError:
            raise OutcomeError("the coordinator did not answer in time; ask again", outcome="unknown") from None
        except ConnectionLostError as error:
            if sent:  # it may have been made all the same
                raise OutcomeError(f"{error}; ask again", outcome="unknown", code=UnavailableError.code) from error
            raise UnavailableError(f"no coordinator: {error}") from error
        await self._enter(reply.entry)
        return reply.entry


def check_name(text: str, field: str) -> None:
    """Refuse a name that no shard would take: the schema counts characters, the disk bytes.

    Once it had a number, it would stand in the way of all that came after it.
    """
    if len(text.encode()) > limits.NAME_BYTES_MAX:
        raise BadRequestError(f"{field}: over {limits.NAME_BYTES_MAX} bytes of UTF-8", field=field)


def _name(worker: Worker) -> messages.WorkerName:
    return messages.WorkerName(worker=worker.instance_id, dp_rank=worker.dp_rank)
