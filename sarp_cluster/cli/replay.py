"""`sarp replay`: traces against an index on this machine, or against a cluster."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from sarp_cluster.cli.connection import add_connection_arguments, client_of
from sarp_cluster.cli.replay_cluster import ClusterIndex
from sarp_cluster.cli.store import REPLAY_SECRET
from sarp_cluster.cli.terminal import Commands, progress_bar, run_loop
from sarp_cluster.client import AsyncClient
from sarp_cluster.config import IndexConfig
from sarp_cluster.replay.arguments import add_replay_arguments, index_config
from sarp_cluster.replay.replay import Progress, replay_trace
from sarp_cluster.replay.report import EXPLANATION, FoundStore, ReplayReport, table
from sarp_cluster.replay.traces import Trace, open_trace
from sarp_cluster.storage.store_directory import SECRET_NAME
from sarp_cluster.types import HashProfile, Namespace, NamespaceSpec, PrefixIndex, Worker, WorkerMark


class OpenedIndex(PrefixIndex, Protocol):
    """An index that the command opened and has to close. It may hold something already."""

    def create_namespace(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of `spec`, new or as it was."""

    def worker_marks(self) -> Mapping[Worker, WorkerMark]:
        """Every worker's generation and the seq of its last change."""

    def held_block_ids(self, namespace: Namespace) -> AsyncIterator[bytes]:
        """Wire IDs of the namespace's blocks of which somebody holds the whole prefix."""

    async def close(self) -> None:
        """Make everything durable and let go of the directory."""


OpenIndex = Callable[[Path, IndexConfig], Awaitable[OpenedIndex]]


async def open_shard_index(directory: Path, config: IndexConfig) -> OpenedIndex:
    """Our own index. Imported when needed: the library does not depend on the services beside it."""
    from shard.reopened import ReopenedIndex  # noqa: PLC0415

    own_secret = await asyncio.to_thread((directory / SECRET_NAME).exists)
    return await ReopenedIndex.open(directory, config, secret=None if own_secret else REPLAY_SECRET)


def add_command(commands: Commands, open_index: OpenIndex) -> None:
    """Add it."""
    replay = commands.add_parser(
        "replay",
        help="replay real traces against an index and compare each answer with the exact one",
        description="Replay traces against an index on this machine: match each request's context, compare the answer "
        "with an exact oracle, insert what the request computed; then report quality, reads, memory and speed. The "
        "index is empty at first, unless --store-dir has a store of the trace already.",
    )
    add_replay_arguments(replay)
    add_connection_arguments(
        replay.add_argument_group("a cluster instead of an index here"),
        url_default=None,
        url_help="its routers, divided by commas: http:// or sarp://HOST:PORT, with TLS https:// or sarps://; "
        "the settings of the index are the shards' own then",
    )
    replay.set_defaults(run=lambda arguments: replay_command(arguments, open_index))


def replay_command(arguments: argparse.Namespace, open_index: OpenIndex) -> None:
    """Replay each trace in its own store, or through a cluster, and print the report."""
    config = index_config(arguments)
    reports: list[ReplayReport] = []
    with ExitStack() as cleanup:
        stores = arguments.store_dir
        if stores is None and arguments.url is None:
            stores = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="sarp-replay-")))
        for path in arguments.traces:
            trace = open_trace(path, block_tokens=arguments.block_tokens)
            total = min(trace.request_count, arguments.limit or trace.request_count)
            with progress_bar(trace.name, "req", total) as bar:
                if arguments.url is not None:
                    client = client_of(arguments)
                    report = run_loop(replay_in_cluster(client, trace, arguments, progress=bar.update))
                else:
                    store = stores / trace.name
                    store.mkdir(parents=True, exist_ok=True)
                    replaying = replay_in(store, trace, config, arguments, open_index=open_index, progress=bar.update)
                    report = run_loop(replaying)
            reports.append(report)
            if arguments.json:
                print(report.to_json(), flush=True)
    if not arguments.json:
        print(table(reports))
        print(EXPLANATION, end="")


async def replay_in_cluster(
    client: AsyncClient, trace: Trace, arguments: argparse.Namespace, *, progress: Progress
) -> ReplayReport:
    """Replay `trace` through a client, in a namespace of its own, and close it."""
    async with client, ClusterIndex(client) as index:
        report = await replay_trace(
            trace,
            index,
            await index.create_namespace(_spec(trace)),
            workers=arguments.workers,
            in_flight=arguments.in_flight,
            limit=arguments.limit,
            progress=progress,
            with_oracle=arguments.oracle,
            with_candidates=False,
            durable=arguments.durable,
        )
    return replace(report, cluster=arguments.url, incomplete=index.incomplete)


def _spec(trace: Trace) -> NamespaceSpec:
    profile = HashProfile.XXH3 if trace.kind == "tokens" else HashProfile.OPAQUE
    return NamespaceSpec(model=f"replay/{trace.name}", block_size=trace.block_tokens, hash_profile=profile)


async def replay_in(
    store: Path,
    trace: Trace,
    config: IndexConfig,
    arguments: argparse.Namespace,
    *,
    open_index: OpenIndex,
    progress: Progress,
) -> ReplayReport:
    """Replay `trace` in an index opened in `store`, and close it."""
    opening = perf_counter()
    index = await open_index(store, config)
    recovery_s = perf_counter() - opening
    try:
        namespace = index.create_namespace(_spec(trace))
        there = index.statistics()
        found = None
        if there.blocks:
            found = FoundStore(segments=there.segments, blocks=there.blocks, recovery_s=recovery_s)
            print(
                f"{store}: reopened; it holds {there.blocks:,} blocks in {there.segments:,} segments, recovered in "
                f"{recovery_s:.3f} s from {there.disk_bytes / 1e6:,.1f} MB of log",
                file=sys.stderr,
            )
        return await replay_trace(
            trace,
            index,
            namespace,
            workers=arguments.workers,
            in_flight=arguments.in_flight,
            limit=arguments.limit,
            progress=progress,
            with_oracle=arguments.oracle,
            with_candidates=arguments.candidates,
            durable=arguments.durable,
            found=found,
            held=None if found is None else index.held_block_ids(namespace),
            marks=index.worker_marks(),
        )
    finally:
        await index.close()
