"""`python -m router`, which is `sarp router`: one router's process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from router.app import RouterService
from sarp_cluster.wire.node import add_node_arguments, node_settings, run_command, run_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sarp router` takes."""
    add_node_arguments(parser, node="router-0", http_port=7100, stream_port=7200)


def run(arguments: argparse.Namespace) -> int:
    """Run a router until it is told to end."""
    settings = node_settings(arguments)
    return run_node(lambda: RouterService(settings), verbose=arguments.verbose)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it from a command line."""
    return run_command("One router: the front door of a cluster.", add_arguments, run, prog="sarp router", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
