"""`sarp match`, `sarp insert`, `sarp remove`: for people who want to see what a cluster knows."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sarp_cluster import limits
from sarp_cluster.cli.connection import add_connection_arguments, client_of
from sarp_cluster.cli.terminal import Commands, aligned, run_loop
from sarp_cluster.client import Namespace
from sarp_cluster.client.async_client import AsyncClient
from sarp_cluster.client.requests import pack_block_ids, pack_tokens
from sarp_cluster.errors import BadRequestError
from sarp_cluster.types import HashProfile, Worker
from sarp_cluster.wire import messages


def add_commands(commands: Commands) -> None:
    """Add the three."""
    match = commands.add_parser(
        "match",
        help="which is the longest prefix of a prompt that somebody holds, and who does?",
        description="Ask a cluster for the longest prefix of these tokens, or block IDs, that a worker holds.",
    )
    _add_sequence(match)
    match.add_argument(
        "--detail", choices=("none", "workers", "blocks"), default="workers", help="(default: %(default)s)"
    )
    match.add_argument(
        "--tier", action="append", choices=messages.TIER_NAMES, help="whose locations count; may be repeated"
    )
    match.add_argument("--worker", action="append", type=worker, metavar="NAME[:RANK]", help="the same")
    match.add_argument("--max-workers", type=int, metavar="N", help="list no more than these, the longest first")
    match.add_argument(
        "--deadline-ms",
        type=int,
        default=1_000,
        metavar="MS",
        help="when an answer is cut short (default: %(default)s)",
    )
    match.set_defaults(run=lambda arguments: _run(match_command, arguments))
    insert = commands.add_parser(
        "insert",
        help="say that a worker holds the blocks of a prompt",
        description="Tell a cluster that a worker newly holds the blocks of these tokens, or these block IDs.",
    )
    _add_change(insert)
    insert.add_argument("--tier", choices=messages.TIER_NAMES, default="gpu", help="where (default: %(default)s)")
    insert.add_argument("--register", action="store_true", help="register the worker for this credential first")
    insert.set_defaults(run=lambda arguments: _run(insert_command, arguments))
    remove = commands.add_parser(
        "remove",
        help="say that a worker no longer holds them",
        description="Tell a cluster that a worker no longer holds blocks of these tokens, or these block IDs.",
    )
    _add_change(remove)
    remove.add_argument("--tier", choices=messages.TIER_NAMES, help="where (default: anywhere)")
    remove.add_argument("--last", type=int, metavar="N", help="only those before position N (default: to the end)")
    remove.set_defaults(run=lambda arguments: _run(remove_command, arguments))


def _add_sequence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "numbers", nargs="*", metavar="NUMBER", help="token IDs of the prompt, or with --ids its block IDs"
    )
    parser.add_argument("--ids", action="store_true", help="the numbers are block IDs")
    parser.add_argument(
        "--file", metavar="FILE", help="read the numbers there, divided by spaces, commas or as JSON; -: from stdin"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="of the namespace")
    parser.add_argument("--lora", default="", metavar="NAME", help="of the namespace")
    parser.add_argument("--salt", default="", metavar="TEXT", help="of the namespace")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (default: %(default)s)")
    parser.add_argument(
        "--hash-profile", choices=[str(one) for one in HashProfile], default="xxh3", help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    add_connection_arguments(parser)


def _add_change(parser: argparse.ArgumentParser) -> None:
    _add_sequence(parser)
    parser.add_argument("--worker", required=True, type=worker, metavar="NAME[:RANK]", help="which worker")
    parser.add_argument("--generation", type=int, default=0, metavar="N", help="of its cache (default: %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="from this position on (default: %(default)s)"
    )


def worker(text: str) -> Worker:
    """NAME or NAME:RANK, for argparse."""
    name, colon, rank = text.rpartition(":")
    if not colon:
        return Worker(text)
    if not name or not rank.isdecimal() or int(rank) > limits.DP_RANK_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME:RANK")
    return Worker(name, int(rank))


def numbers_of(arguments: argparse.Namespace) -> list[int]:
    """The numbers given on the command line, in a file, or on stdin."""
    texts: Sequence[str] = arguments.numbers
    if arguments.file is not None:
        if texts:
            raise BadRequestError("--file: give either numbers or a file", field="file")
        raw = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text()
        texts = re.split(r"[\s,\[\]]+", raw.strip())
    try:
        return [int(text, 0) for one in texts for text in re.split(r"[,\s]+", one) if text]
    except ValueError as error:
        raise BadRequestError(f"numbers: {error}", field="numbers") from None


async def _namespace(client: AsyncClient, arguments: argparse.Namespace) -> Namespace:
    return await client.namespace(
        arguments.model,
        lora=arguments.lora,
        salt=arguments.salt,
        block_size=arguments.block_size,
        hash_profile=arguments.hash_profile,
    )


def _run(command: Callable[..., Coroutine[Any, Any, None]], arguments: argparse.Namespace) -> None:
    run_loop(command(arguments, client_of(arguments), numbers_of(arguments)))


def _block_ids(namespace: Namespace, arguments: argparse.Namespace, numbers: list[int]) -> bytes:
    return pack_block_ids(numbers) if arguments.ids else namespace.block_ids(pack_tokens(numbers))


async def match_command(arguments: argparse.Namespace, client: AsyncClient, numbers: list[int]) -> None:
    """Ask, and print the answer."""
    async with client:
        namespace = await _namespace(client, arguments)
        block_ids = _block_ids(namespace, arguments, numbers)
        reply = await client.match(
            namespace,
            block_ids=block_ids,
            detail=arguments.detail,
            tiers=arguments.tier,
            workers=arguments.worker,
            max_workers=arguments.max_workers,
            deadline_ms=arguments.deadline_ms,
        )
    if arguments.json:
        print(msgspec.json.encode(reply).decode())
        return
    print(f"{reply.matched_blocks} of {len(block_ids) // 8} blocks, {reply.matched_tokens} tokens", end="")
    print("" if reply.complete else f" (not all there may be: {', '.join(reply.degraded)})")
    if reply.workers:
        head = ("worker", "rank", *messages.TIER_NAMES)
        rows = [(one.worker, one.dp_rank, one.gpu, one.cpu, one.ssd, one.remote) for one in reply.workers]
        print(aligned([head, *rows]), end="")
    for position, places in enumerate(reply.blocks or ()):
        print(f"{position:>6}  {', '.join(f'{place.worker}:{place.dp_rank} {place.tier}' for place in places)}")


async def insert_command(arguments: argparse.Namespace, client: AsyncClient, numbers: list[int]) -> None:
    """Insert, and say what became of it."""
    async with client:
        namespace = await _namespace(client, arguments)
        if arguments.register:
            await client.register_worker(arguments.worker)
        reply = await client.insert(
            namespace,
            block_ids=_block_ids(namespace, arguments, numbers),
            worker=arguments.worker,
            generation=arguments.generation,
            tier=arguments.tier,
            first=arguments.first,
        )
    _print(arguments, reply, f"inserted; {reply.blocks_added} blocks were new")


async def remove_command(arguments: argparse.Namespace, client: AsyncClient, numbers: list[int]) -> None:
    """Remove, and say what became of it."""
    async with client:
        namespace = await _namespace(client, arguments)
        reply = await client.remove(
            namespace,
            block_ids=_block_ids(namespace, arguments, numbers),
            worker=arguments.worker,
            generation=arguments.generation,
            tier=arguments.tier,
            first=arguments.first,
            last=arguments.last,
        )
    _print(arguments, reply, f"removed; {reply.segments_changed} segments changed")


def _print(arguments: argparse.Namespace, reply: messages.Reply, text: str) -> None:
    print(json.dumps(msgspec.to_builtins(reply)) if arguments.json else text)
