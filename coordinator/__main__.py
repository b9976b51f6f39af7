"""`python -m coordinator`, which is `sarp coordinator`: one coordinator's process, and the shards it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from coordinator.app import CoordinatorService, CoordinatorSettings
from sarp_cluster.cluster.redis_address import parse_redis_url
from sarp_cluster.config import read_index_config
from sarp_cluster.errors import BadRequestError
from sarp_cluster.wire.node import add_node_arguments, node_settings, read_private, run_command, run_node

HTTP_PORT = 7099
STREAM_PORT = 7199


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sarp coordinator` takes."""
    add_node_arguments(parser, node="coordinator-0", http_port=HTTP_PORT, stream_port=STREAM_PORT)
    parser.add_argument(
        "--expect",
        type=int,
        metavar="N",
        help="make the first slot map when N shards have joined (default: those of --shards, or 1)",
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=0,
        metavar="N",
        help="start N shards on this machine, shard-0 and so on, and start them again when they end",
    )
    parser.add_argument(
        "--shard-http-port",
        type=int,
        default=7101,
        metavar="PORT",
        help="of the first of these shards, the others follow; 0: any (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-stream-port", type=int, default=7201, metavar="PORT", help="the same (default: %(default)s)"
    )
    parser.add_argument(
        "--stop-shards", action="store_true", help="end these shards with the coordinator (default: they go on)"
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="keep the records in Redis, so that there may be several coordinators (default: in the directory)",
    )
    parser.add_argument("--redis-password", type=Path, metavar="FILE", help="the password, for its owner to read only")
    parser.add_argument(
        "--index",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of these shards' indexes (docs/configuration.md); may be given several times",
    )
    parser.add_argument(
        "--splits",
        type=Path,
        metavar="FILE",
        help="split table of the first slot map: a JSON object of internal block ID to position",
    )


def settings(arguments: argparse.Namespace) -> CoordinatorSettings:
    """The settings of a command line. Raises BadRequestError naming the option."""
    expected = arguments.shards or 1 if arguments.expect is None else arguments.expect
    for option, value in (("--shards", arguments.shards), ("--expect", expected - 1)):
        if value < 0:
            raise BadRequestError(f"{option}: too few", field=option.strip("-"))
    read_index_config(arguments.index)  # or each shard would end at once, and be started again
    splits: dict[int, int] = {}
    if arguments.splits is not None:
        try:
            splits = msgspec.json.decode(arguments.splits.read_bytes(), type=dict[int, int])
        except (OSError, msgspec.DecodeError) as error:
            raise BadRequestError(f"--splits: {arguments.splits}: {error}", field="splits") from error
    redis = None
    if arguments.redis is not None:
        password = None
        if arguments.redis_password is not None:
            password = read_private(arguments.redis_password, "--redis-password").decode().strip()
        redis = parse_redis_url(arguments.redis, password)
    elif arguments.redis_password is not None:
        raise BadRequestError("--redis-password: there is no --redis", field="redis_password")
    return CoordinatorSettings(
        redis=redis,
        expected=expected,
        splits=splits,
        supervised=_supervised(arguments) if arguments.shards else None,
        stop_shards=arguments.stop_shards,
    )


def _supervised(arguments: argparse.Namespace) -> Callable[[str], Mapping[str, Sequence[str]]]:
    def commands(coordinator: str) -> dict[str, list[str]]:
        return {f"shard-{number}": _shard_command(arguments, coordinator, number) for number in range(arguments.shards)}

    return commands


def _shard_command(arguments: argparse.Namespace, coordinator: str, number: int) -> list[str]:
    """How a shard is started: with our own credentials, beside our directory's records."""
    name = f"shard-{number}"
    options: dict[str, object] = {
        "--name": name,
        "--directory": arguments.directory.resolve() / "shards" / name,
        "--host": arguments.host,
        "--http-port": arguments.shard_http_port and arguments.shard_http_port + number,
        "--stream-port": arguments.shard_stream_port and arguments.shard_stream_port + number,
        "--cluster-secret": arguments.cluster_secret.resolve(),
    }
    if arguments.advertise:
        options["--advertise"] = arguments.advertise
    if arguments.credentials is not None:
        options["--credentials"] = arguments.credentials.resolve()
    if arguments.tls_certificate is not None:
        options["--tls-certificate"] = arguments.tls_certificate.resolve()
    if arguments.tls_key is not None:
        options["--tls-key"] = arguments.tls_key.resolve()
    if arguments.tls_ca is not None:
        options["--tls-ca"] = arguments.tls_ca.resolve()
    flags = [f"--{flag}" for flag in ("insecure", "verbose") if getattr(arguments, flag)]
    # This coordinator, and the others: whichever leads gives the leases.
    places = [("--coordinator", place) for place in (coordinator, *arguments.coordinator)]
    found = (str(part) for option in (*places, *options.items()) for part in option)
    index = (part for setting in arguments.index for part in ("--index", setting))
    return [sys.executable, "-m", "shard", *found, *index, *flags]


def run(arguments: argparse.Namespace) -> int:
    """Run a coordinator until it is told to end."""
    node, own = node_settings(arguments), settings(arguments)
    return run_node(lambda: CoordinatorService(node, own), verbose=arguments.verbose)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it from a command line."""
    return run_command(
        "The coordinator: leases, health, the slot map, and the shards it starts.",
        add_arguments,
        run,
        prog="sarp coordinator",
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
