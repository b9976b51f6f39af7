"""A node's line to the coordinator: when it says something again."""

from __future__ import annotations

import asyncio
from typing import Any

from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.coordination import CoordinatorLine
from tests.crash.virtual_time import run

INTERVAL_S = 10.0


class Node:
    """One that knows some changes, and learns all there are when it fetches, or nothing."""

    def __init__(self, *, learns: bool = True) -> None:
        self.view = ClusterView()
        self.learns = learns
        self.heard_at: list[tuple[float, int]] = []

    def report(self) -> tuple[str, Any]:
        return "shard_heartbeat", messages.Empty()

    def heard(self, _: control.HeartbeatReply, sent_at: float) -> None:
        self.heard_at.append((sent_at, self.view.number))

    async def take(self, view: control.View) -> None:
        if self.learns:
            self.view.registry.number = view.number


class Coordinator:
    """In the place of a peer. It knows some changes, and between two heartbeats there may be more."""

    def __init__(self, *, more: int = 0) -> None:
        self.number = 7
        self.more = more

    async def run(self) -> None: ...

    async def wait_connected(self) -> None: ...

    async def call(self, name: str, *_: object) -> Any:
        if name == "fetch":
            return control.View(cluster="c", slot_map=None, number=self.number, entries=[], nodes=[])
        self.number += self.more
        return control.HeartbeatReply(lease_ms=1, epoch=0, number=self.number, nodes=[], leading=True)


def heartbeats(node: Node, coordinator: Coordinator) -> list[int]:
    """In which interval each of a node's heartbeats was sent."""

    async def some_time() -> None:
        line = CoordinatorLine([("there", 1)], lambda: control.Hello(version=1), node, interval_s=INTERVAL_S)
        line.peer = coordinator  # type: ignore[assignment]
        try:
            async with asyncio.timeout(2.5 * INTERVAL_S):
                await line.run()
        except TimeoutError:
            pass

    run(some_time)
    return [round(at / INTERVAL_S) for at, _ in node.heard_at]


def test_what_was_fetched_is_told_at_once() -> None:
    node = Node()
    assert heartbeats(node, Coordinator()) == [0, 0, 1, 2]
    assert [number for _, number in node.heard_at] == [0, 7, 7, 7]


def test_who_learns_nothing_waits() -> None:
    assert heartbeats(Node(learns=False), Coordinator()) == [0, 1, 2]


def test_whatever_changes_no_node_says_more_than_twice_as_much() -> None:
    assert heartbeats(Node(), Coordinator(more=1)) == [0, 0, 1, 1, 2, 2]
