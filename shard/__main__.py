"""`python -m shard`, which is `sarp shard`: one shard's process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sarp_cluster.config import read_index_config
from sarp_cluster.wire.node import add_node_arguments, node_settings, run_command, run_node
from shard.app import ShardService


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sarp shard` takes."""
    add_node_arguments(parser, node="shard-0", http_port=7101, stream_port=7201)
    parser.add_argument(
        "--index",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the index (docs/configuration.md), such as retrieval_max=none; may be given several times",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a shard until it is told to end."""
    settings, config = node_settings(arguments), read_index_config(arguments.index)
    return run_node(lambda: ShardService(settings, config), verbose=arguments.verbose)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it from a command line."""
    return run_command("One shard: an index over its own directory.", add_arguments, run, prog="sarp shard", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
