"""`sarp up`, `sarp shard`, `sarp router`, `sarp coordinator`: processes of a cluster.

Each is `python -m` of its package. What a service imports is imported when its command is used.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, Final

from sarp_cluster.cli.terminal import Commands

SERVICES: Final = {
    "up": ("sarp_cluster.up", "run a whole cluster on this machine, in the foreground"),
    "shard": ("shard.__main__", "run one shard: an index over its own directory"),
    "router": ("router.__main__", "run one router: the front door of a cluster"),
    "coordinator": ("coordinator.__main__", "run a coordinator: leases, health, the slot map, the shards it starts"),
}


def add_commands(commands: Commands) -> None:
    """Add them."""
    for name, (module, what) in SERVICES.items():
        parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        parser.fill = _filling(module)


def _filling(module: str) -> Any:  # noqa: ANN401  # a function of a parser
    def fill(parser: argparse.ArgumentParser) -> None:
        service = import_module(module)
        service.add_arguments(parser)
        parser.set_defaults(run=service.run)

    return fill
