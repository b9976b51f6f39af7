"""A whole cluster in one event loop, from a seed: virtual time, a network that can be cut, nodes that can be stopped.

Everything a node begins inherits its `Node` (a context variable). What a paused node would run is kept until it goes
on; what a killed node would run never runs, not even its `finally`: so ends a process. Connections live in memory; each
chunk takes a time drawn from the seed, in order within a connection. Helper threads' work is done at once, its result
comes some turns later. Time passes only when nothing else is due, so hours take seconds.
"""

from __future__ import annotations

import asyncio
import contextvars
import fcntl
import random
import selectors
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

TURN_S: Final = 0.0001
"""What a turn of the loop takes."""
LATENCY_S: Final = (0.0001, 0.002)
"""Of the network, from and to."""
EXECUTOR_S: Final = (0.0, 0.004)
"""How late a helper thread's result comes, from and to."""

_node: contextvars.ContextVar[Node | None] = contextvars.ContextVar("node", default=None)


class Node:
    """One process of the simulation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paused = False
        self.dead = False
        self.buried = False
        """Its tasks are let end, and may touch nothing any more."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.servers: list[_Server] = []
        self.transports: list[_Transport] = []
        self.locks: set[int] = set()
        """Descriptors of the file locks it holds."""
        self._kept: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def __repr__(self) -> str:
        return f"Node({self.name}{', dead' if self.dead else ', paused' if self.paused else ''})"

    def run(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback of this node, if it runs at all now."""
        if self.dead or self.paused:
            self._kept.append((callback, args))
            return
        callback(*args)

    def close_locks(self) -> None:
        """What the kernel does when a process ends: its file locks are free."""
        for descriptor in self.locks:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self.locks.clear()

    def take_kept(self) -> deque[tuple[Callable[..., object], tuple[Any, ...]]]:
        """What was due while it was paused."""
        kept, self._kept = self._kept, deque()
        return kept


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The loop, its clock and its network."""

    def __init__(self, seed: object) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self.rng = random.Random(f"{seed}/network")
        self._listening: dict[tuple[str, int], _Server] = {}
        self._next_port = 20_000
        self.cut: set[tuple[str, str]] = set()
        """(from, to): nothing that one node sends reaches the other; both ways when both are here."""
        self.lost_chunks = 0
        self.resumed_at: list[float] = []
        """When nodes went on that had been paused."""

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._clock.now

    # --- nodes --------------------------------------------------------------------------------------------------------

    def start(self, node: Node, main: Callable[[], Any]) -> asyncio.Task[Any]:
        """Run a node's main coroutine."""
        context = contextvars.copy_context()
        context.run(_node.set, node)
        task = self.create_task(main(), context=context)
        return task

    def kill(self, node: Node) -> None:
        """SIGKILL: its callbacks never run again, its connections are reset, its ports are free."""
        node.dead = True
        for server in list(node.servers):
            server.close()
        for transport in list(node.transports):
            transport.reset()
        node.close_locks()

    async def bury(self, nodes: list[Node]) -> None:
        """After the simulation: let the tasks of killed nodes end, so that nothing of them is left to the collector."""
        for node in nodes:
            node.buried = True
            node.dead = node.paused = False
            for callback, args in node.take_kept():
                super().call_soon(node.run, callback, *args)
        tasks = [task for task in asyncio.all_tasks(self) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=3600)

    def pause(self, node: Node) -> None:
        """SIGSTOP: it runs no further; its connections stay, and take what is sent."""
        node.paused = True

    def resume(self, node: Node) -> None:
        """SIGCONT: what was due meanwhile is due now."""
        node.paused = False
        self.resumed_at.append(self.time())
        for callback, args in node.take_kept():
            super().call_soon(node.run, callback, *args)

    # --- the loop's calls ---------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """As in asyncio; the callback runs as the node that the context says."""
        node = _node_of(context)
        if node is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(node.run, _within(callback, context), *args, context=contextvars.Context())

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """As in asyncio; the callback runs as the node that the context says."""
        node = _node_of(context)
        if node is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, node.run, _within(callback, context), *args, context=contextvars.Context())

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Done at once, told later."""
        waiter: asyncio.Future[T] = self.create_future()

        def tell(outcome: T | None, error: BaseException | None) -> None:
            if not waiter.done():
                if error is not None:
                    waiter.set_exception(error)
                else:
                    waiter.set_result(outcome)  # type: ignore[arg-type]

        def work() -> None:
            try:
                outcome, failure = func(*args), None
            except Exception as error:  # it is whoever waits that has it
                outcome, failure = None, error
            self.call_later(self.rng.uniform(*EXECUTOR_S), tell, outcome, failure)

        self.call_soon(work)
        return waiter

    # --- the network --------------------------------------------------------------------------------------------------

    async def create_server(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Listen, in memory."""
        node = _node.get()
        if not port:
            self._next_port += 1
            port = self._next_port
        key = (str(host), int(port))
        if key in self._listening:
            raise OSError(98, "address in use")
        server = self._listening[key] = _Server(self, key, factory, node)
        if node is not None:
            node.servers.append(server)
        return server

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect to what listens, in memory."""
        node = _node.get()
        await asyncio.sleep(self.latency())
        server = self._listening.get((str(host), int(port)))
        if server is None or (server.node is not None and server.node.dead):
            raise ConnectionRefusedError(111, "nobody listens")
        if self.is_cut(node, server.node) or self.is_cut(server.node, node):
            await asyncio.sleep(3600)  # no answer; whoever asks has a time limit
        ours, theirs = _Transport(self, node), _Transport(self, server.node)
        ours.peer, theirs.peer = theirs, ours
        protocol = factory()
        ours.begin(protocol)

        def accept() -> None:
            accepted = server.factory()
            theirs.begin(accepted)

        if server.node is None:
            self.call_soon(accept)
        else:
            context = contextvars.Context()
            context.run(_node.set, server.node)
            self.call_soon(accept, context=context)
        return ours, protocol

    def is_cut(self, source: Node | None, target: Node | None) -> bool:
        """Does nothing get from one to the other?"""
        return ("" if source is None else source.name, "" if target is None else target.name) in self.cut

    def latency(self) -> float:
        """What the next chunk takes."""
        return self.rng.uniform(*LATENCY_S)

    def forget(self, server: _Server) -> None:
        """It listens no more."""
        if self._listening.get(server.key) is server:
            del self._listening[server.key]


def _node_of(context: contextvars.Context | None) -> Node | None:
    return _node.get() if context is None else context.get(_node)


def _within(callback: Callable[..., object], context: contextvars.Context | None) -> Callable[..., object]:
    """The callback in its context: the handle itself runs in none, so that a node can be looked at first."""
    wanted = contextvars.copy_context() if context is None else context
    return lambda *args: wanted.run(callback, *args)


class _Clock(selectors.DefaultSelector):
    """Lets time pass instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or TURN_S
        return super().select(0)


class _Socket:
    def __init__(self, key: tuple[str, int]) -> None:
        self._key = key

    def getsockname(self) -> tuple[str, int]:
        return self._key


class _Server:
    def __init__(self, loop: SimulatedLoop, key: tuple[str, int], factory: Any, node: Node | None) -> None:
        self._loop = loop
        self.key = key
        self.factory = factory
        self.node = node
        self.sockets = [_Socket(key)]

    def close(self) -> None:
        self._loop.forget(self)

    async def wait_closed(self) -> None:
        return None


class _Transport(asyncio.Transport):
    """One end of a connection. What is written arrives later, in order, unless the network is cut."""

    def __init__(self, loop: SimulatedLoop, node: Node | None) -> None:
        super().__init__()
        self._loop = loop
        self.node = node
        self.peer: _Transport | None = None
        self.protocol: Any = None
        self._closed = False
        self._reading = True
        self._arrived: deque[bytes | None] = deque()
        self._due = 0.0
        if node is not None:
            node.transports.append(self)

    def begin(self, protocol: Any) -> None:
        self.protocol = protocol
        protocol.connection_made(self)
        self._deliver()

    # --- asyncio.Transport --------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if not self._closed:
            self._send(bytes(data))

    def close(self) -> None:
        if not self._closed:
            self._send(None)
            self._end(None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._deliver)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no end to what it takes."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    # --- the way of a chunk -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """This end's process is gone: the other learns of it, this one learns nothing any more."""
        if not self._closed:
            self._closed = True
            self._send(None)

    def _send(self, data: bytes | None) -> None:
        peer = self.peer
        if peer is None:
            return
        self._due = max(self._loop.time() + self._loop.latency(), self._due)
        # By no node: the network carries what was sent before its sender died.
        asyncio.SelectorEventLoop.call_at(
            self._loop, self._due, self._arrive, peer, data, context=contextvars.Context()
        )

    def _arrive(self, peer: _Transport, data: bytes | None) -> None:
        if self._loop.is_cut(self.node, peer.node):
            # What TCP would send again comes when the cut is healed, or never, if a connection ended before.
            self._loop.lost_chunks += 1
            asyncio.SelectorEventLoop.call_later(
                self._loop, 0.2, self._arrive, peer, data, context=contextvars.Context()
            )
            return
        peer._take(data)

    def _take(self, data: bytes | None) -> None:
        if self._closed:
            return
        self._arrived.append(data)
        if self.node is None:
            self._loop.call_soon(self._deliver)
        else:
            context = contextvars.Context()
            context.run(_node.set, self.node)
            self._loop.call_soon(self._deliver, context=context)

    def _deliver(self) -> None:
        while self._arrived and self._reading and self.protocol is not None and not self._closed:
            data = self._arrived.popleft()
            if data is None:
                self._end(ConnectionResetError("reset by peer"))
            else:
                self.protocol.data_received(data)

    def _end(self, error: Exception | None) -> None:
        self._closed = True
        if self.node is not None and self in self.node.transports:
            self.node.transports.remove(self)
        if self.protocol is not None:
            self._loop.call_soon(self.protocol.connection_lost, error)
