"""Changes without a key through a router: what it says of those it knows no answer to, and what it keeps of them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.cluster.registry import Registry, WorkerEntry
from sarp_cluster.cluster.view_file import load_view
from sarp_cluster.errors import OutcomeError, UnavailableError
from sarp_cluster.storage.record_file import RecordFile
from sarp_cluster.types import Worker
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.auth import Principal
from sarp_cluster.wire.faults import describe
from sarp_cluster.wire.operations import SCOPES
from tests.local_cluster import local_cluster, until

ANYBODY = Principal("me", ["default"], SCOPES, "default")


async def test_a_change_whose_answer_is_lost_may_have_been_made(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        router = cluster.routers[0]
        make = cluster.coordinator.change

        async def lose(principal: Principal, request: control.ChangeRequest) -> control.ChangeReply:
            reply = await make(principal, request)
            client = router.line.peer.client
            assert client is not None
            client.close()
            return reply

        cluster.coordinator.change = lose  # type: ignore[method-assign,assignment]
        with pytest.raises(OutcomeError) as caught:
            await router.keyless.register_worker(ANYBODY, messages.RegisterRequest(worker="w"))
        assert describe(caught.value, change=True).outcome == "unknown"
        assert cluster.coordinator.view.number == 1


async def test_a_change_that_could_not_be_sent_was_not_made(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        router = cluster.routers[0]
        assert cluster._stream is not None
        await cluster._stream.close()
        await until(lambda: not router.line.peer.connected)
        with pytest.raises(UnavailableError) as caught:
            await router.keyless.register_worker(ANYBODY, messages.RegisterRequest(worker="w"))
        assert describe(caught.value, change=True).outcome == "not_applied"


async def test_what_a_router_had_changed_it_knows_after_a_restart_without_a_coordinator(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        router = cluster.routers[0]

        async def install(**_: Any) -> None:
            """Nobody is told but who asks."""

        cluster.install = install  # type: ignore[method-assign,assignment]
        made = await router.keyless.create_namespace(ANYBODY, messages.NamespaceRequest(model="m"))
        await cluster.stop("router-0")
        assert made.namespace in (await kept(tmp_path / "router-0")).namespaces


async def test_what_lies_between_two_changes_is_not_taken_for_known(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        router = cluster.routers[0]

        async def install(**_: Any) -> None:
            """Nobody is told but who asks."""

        cluster.install = install  # type: ignore[method-assign,assignment]
        view = cluster.coordinator.view
        view.registry.apply([WorkerEntry(1, "another's", 0, "me")])
        await router.keyless.register_worker(ANYBODY, messages.RegisterRequest(worker="w"))
        await router._save()
        found = await kept(tmp_path / "router-0")
        assert (found.number, list(found.workers)) in [(0, []), (2, [Worker("another's", 0), Worker("w", 0)])]
        await until(lambda: router.view.number == 2)
        await cluster.stop("router-0")
        assert list((await kept(tmp_path / "router-0")).workers) == [Worker("another's", 0), Worker("w", 0)]


async def kept(directory: Path) -> Registry:
    """What a router that has ended will know when it starts."""
    file = await RecordFile.open(directory / "copy")
    await asyncio.to_thread(shutil.copy, directory / "view", directory / "copy")
    content = await load_view(file)
    await file.close()
    assert content is not None
    return content.registry()
