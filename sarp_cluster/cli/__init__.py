"""The `sarp` command. Each module adds the parsers of its commands and names the functions that run them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from sarp_cluster.cli import blocks, cluster, credential, nodes, replay, store
from sarp_cluster.cli.replay import OpenedIndex, OpenIndex, open_shard_index
from sarp_cluster.cli.store import REPLAY_SECRET
from sarp_cluster.cli.terminal import LazyParser
from sarp_cluster.errors import SarpError

EXIT_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells count."""

__all__ = ["REPLAY_SECRET", "OpenedIndex", "build_parser", "main"]


def main(argv: Sequence[str] | None = None, *, open_index: OpenIndex = open_shard_index) -> int:
    """Run `sarp` and return its exit status: 0, 2 for an error, 130 when interrupted."""
    arguments = build_parser(open_index).parse_args(argv)
    try:
        status = arguments.run(arguments)
    except (SarpError, OSError) as error:
        print(f"sarp: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("sarp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status or 0


def build_parser(open_index: OpenIndex = open_shard_index) -> LazyParser:
    """The parser of the command line."""
    parser = LazyParser(prog="sarp", description="SARP Cluster: which KVCache prefix is held where?")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=LazyParser)
    nodes.add_commands(commands)
    cluster.add_commands(commands)
    credential.add_command(commands)
    blocks.add_commands(commands)
    replay.add_command(commands, open_index)
    store.add_commands(commands)
    return parser
