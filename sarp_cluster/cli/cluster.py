"""`sarp status`, `sarp events`, `sarp snapshot`, `sarp drain`: for operators."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Final

import msgspec

from sarp_cluster import limits
from sarp_cluster.cli.connection import add_connection_arguments, client_of
from sarp_cluster.cli.terminal import Commands, aligned, run_loop
from sarp_cluster.client import AsyncClient, CallError
from sarp_cluster.types import Event
from sarp_cluster.wire import messages

HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"
EVENTS_SHOWN: Final = 8


def add_commands(commands: Commands) -> None:
    """Add the four."""
    status = commands.add_parser(
        "status",
        help="a live table of the cluster's shards and routers, and what happened last",
        description="Show the cluster as its coordinator sees it, again and again until Ctrl-C. Needs the admin scope.",
    )
    status.add_argument("--once", action="store_true", help="show it once (so it is where stdout is no terminal)")
    status.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (default: %(default)s)")
    status.add_argument("--json", action="store_true", help="print it once, as JSON")
    add_connection_arguments(status)
    status.set_defaults(run=lambda arguments: run_loop(status_command(arguments, client_of(arguments))))
    events = commands.add_parser(
        "events",
        help="what happened in the cluster",
        description="Print the coordinator's timeline, oldest first. Needs the admin scope.",
    )
    events.add_argument("--after", type=int, default=0, metavar="N", help="only events after number N")
    events.add_argument("--follow", action="store_true", help="go on with what happens, until Ctrl-C")
    events.add_argument("--json", action="store_true", help="print each as a JSON object on a line of its own")
    add_connection_arguments(events)
    events.set_defaults(run=lambda arguments: run_loop(events_command(arguments, client_of(arguments))))
    for name, what in (
        ("snapshot", "have a shard take a snapshot now"),
        ("drain", "have a shard refuse changes, finish those under way, take a snapshot, and end"),
    ):
        parser = commands.add_parser(name, help=what, description=f"{what.capitalize()}. Needs the admin scope.")
        parser.add_argument("shard", metavar="SHARD", help="its name, as `sarp status` has it")
        add_connection_arguments(parser)
        parser.set_defaults(
            run=lambda arguments, name=name: run_loop(shard_command(arguments.shard, name, client_of(arguments)))
        )


async def status_command(arguments: argparse.Namespace, client: AsyncClient) -> None:
    """Show the cluster, once or until interrupted."""
    live = sys.stdout.isatty() and not arguments.once and not arguments.json
    async with client:
        if arguments.json:
            print(msgspec.json.encode(await client.cluster()).decode())
            return
        newest: deque[Event] = deque(maxlen=EVENTS_SHOWN)
        if not live:
            print(await _screen(client, newest), end="")
            return
        while True:
            try:
                screen = await _screen(client, newest)
            except CallError as error:
                screen = f"{datetime.now(UTC):%H:%M:%S}  {error}\n"
            print(HOME_AND_CLEAR + screen, end="", flush=True)
            await asyncio.sleep(arguments.interval)


async def _screen(client: AsyncClient, newest: deque[Event]) -> str:
    cluster = await client.cluster()
    newest += await client.events(after=newest[-1].number if newest else 0, limit=limits.EVENTS_KEPT)
    return status_table(cluster) + "".join(f"{event_line(one)}\n" for one in newest)


def status_table(cluster: messages.ClusterReply) -> str:
    """The cluster as text."""
    lead = "leads" if cluster.leading else "does not lead"
    text = (
        f"cluster {cluster.cluster or '-'}   {cluster.coordinator} {lead}   slot map {cluster.epoch}, "
        f"{cluster.splits} splits   change {cluster.number}\n\n"
    )
    rows: list[tuple[object, ...]] = [
        (
            "shard",
            "state",
            "slots",
            "blocks",
            "memory",
            "disk",
            "log behind",
            "snapshot",
            "lease",
            "map",
            "recovered in",
        )
    ]
    for one in cluster.shards:
        rows.append(
            (
                one.shard,
                one.state,
                one.slots,
                f"{one.blocks:,}",
                _bytes(one.resident_bytes),
                _bytes(one.disk_bytes),
                _bytes(one.log_bytes),
                f"{one.snapshot_age_s:.0f} s ago",
                f"{one.lease_left_s:.0f} s",
                one.epoch if one.epoch == cluster.epoch else f"{one.epoch} (old)",
                f"{one.recovery_s:.3f} s",
            )
        )
    text += aligned(rows)
    routers: list[tuple[object, ...]] = [("router", "HTTP", "map", "heard")]
    routers += [(one.router, one.http, one.epoch, f"{one.seen_s:.1f} s ago") for one in cluster.routers]
    return f"{text}\n{aligned(routers)}\n"


def event_line(event: Event) -> str:
    """One event as text."""
    when = datetime.fromtimestamp(event.time, UTC)
    return (
        f"{event.number:>6}  {when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03}  {event.node:<16} "
        f"{event.kind}: {event.text}"
    )


async def events_command(arguments: argparse.Namespace, client: AsyncClient) -> None:
    """Print what happened."""
    after = arguments.after
    async with client:
        while True:
            found = await client.events(after=after)
            for event in found:
                print(msgspec.json.encode(event).decode() if arguments.json else event_line(event), flush=True)
                after = max(after, event.number)
            if found:
                continue
            if not arguments.follow:
                return
            await asyncio.sleep(1)


async def shard_command(shard: str, name: str, client: AsyncClient) -> None:
    """Snapshot or drain a shard."""
    async with client:
        await (client.snapshot_shard if name == "snapshot" else client.drain_shard)(shard)
    print(f"{shard}: {'the snapshot is taken' if name == 'snapshot' else 'drained'}")


def _bytes(number: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number} B"
