"""The client for code without asyncio: the AsyncClient on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from sarp_cluster.client.async_client import AsyncClient
from sarp_cluster.client.requests import WorkerLike
from sarp_cluster.client.writer import WorkerWriter
from sarp_cluster.errors import BadRequestError

P = ParamSpec("P")
R = TypeVar("R")
Inner = TypeVar("Inner")


class Blocking(Generic[Inner, P, R]):
    """A coroutine method of what is inside, as one that blocks: same arguments, same result, same errors."""

    def __init__(self, method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, owner: _OnLoop[Inner], _: type[object] | None = None) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return owner.run(self._method(owner.inner, *args, **kwargs))

        return call


class _OnLoop(Generic[Inner]):
    """Something whose coroutines run on a loop in another thread."""

    def __init__(self, inner: Inner, loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self._loop = loop

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Its result. An interrupt cancels it."""
        if self._loop.is_closed():
            coroutine.close()
            raise BadRequestError("the client is closed", field="client")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class Writer(_OnLoop[WorkerWriter]):
    """See sarp_cluster.client.writer.WorkerWriter. Threads may share it; their changes go in some order."""

    insert = Blocking(WorkerWriter.insert)
    remove = Blocking(WorkerWriter.remove)
    flush = Blocking(WorkerWriter.flush)


class Client(_OnLoop[AsyncClient]):
    """See sarp_cluster.client.async_client.AsyncClient: the same arguments, the same methods. Threads may share it."""

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
        client = AsyncClient(
            url, credential=credential, tenant=tenant, direct=direct, batch_matches=batch_matches, tls=tls
        )
        super().__init__(client, asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._loop.run_forever, name="sarp-client", daemon=True)
        self._thread.start()
        self.run(client.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._loop.is_closed():
            return
        try:
            self.run(self.inner.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    namespace = Blocking(AsyncClient.namespace)
    match = Blocking(AsyncClient.match)
    insert = Blocking(AsyncClient.insert)
    remove = Blocking(AsyncClient.remove)
    batch = Blocking(AsyncClient.batch)
    register_worker = Blocking(AsyncClient.register_worker)
    heartbeat = Blocking(AsyncClient.heartbeat)
    clear_worker = Blocking(AsyncClient.clear_worker)
    drain_worker = Blocking(AsyncClient.drain_worker)
    deregister_worker = Blocking(AsyncClient.deregister_worker)
    workers = Blocking(AsyncClient.workers)
    cluster = Blocking(AsyncClient.cluster)
    slots = Blocking(AsyncClient.slots)
    events = Blocking(AsyncClient.events)
    snapshot_shard = Blocking(AsyncClient.snapshot_shard)
    recover_shard = Blocking(AsyncClient.recover_shard)
    drain_shard = Blocking(AsyncClient.drain_shard)
    purge_tenant = Blocking(AsyncClient.purge_tenant)

    @contextmanager
    def writer(self, worker: WorkerLike, *, generation: int = 0, first_seq: int | None = None) -> Iterator[Writer]:
        """As AsyncClient.writer."""
        with self._entered(self.inner.writer(worker, generation=generation, first_seq=first_seq)) as writer:
            yield Writer(writer, self._loop)

    @contextmanager
    def heartbeats(self, *workers: WorkerLike, interval_s: float = 1.0) -> Iterator[None]:
        """As AsyncClient.heartbeats: they go on while this thread does something else."""
        with self._entered(self.inner.heartbeats(*workers, interval_s=interval_s)):
            yield

    @contextmanager
    def _entered(self, context: AbstractAsyncContextManager[R]) -> Iterator[R]:
        entered = self.run(_enter(context))
        try:
            yield entered
        except BaseException as error:
            if not self.run(_leave(context, error)):
                raise
        else:
            self.run(_leave(context, None))


async def _enter(context: AbstractAsyncContextManager[R]) -> R:
    return await context.__aenter__()


async def _leave(context: AbstractAsyncContextManager[Any], error: BaseException | None) -> bool:
    return bool(await context.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None))
