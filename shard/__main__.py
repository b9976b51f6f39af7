"""`python -m shard`, which is `sarp shard`: one shard's process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sarp_cluster.config import read_index_config
from sarp_cluster.errors import SarpError
from sarp_cluster.wire.node import EXIT_ERROR, add_node_arguments, node_settings, run_node
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
    parser = argparse.ArgumentParser(prog="sarp shard", description="One shard: an index over its own directory.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except SarpError as error:
        print(f"sarp shard: error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
