"""The `sarp` command. Each subcommand adds its parser and names the function that runs it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from tqdm import tqdm  # type: ignore[import-untyped]

from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import BadRequestError, SarpError
from sarp_cluster.replay.arguments import add_replay_arguments, index_config
from sarp_cluster.replay.replay import Progress, replay_trace
from sarp_cluster.replay.report import EXPLANATION, ReplayReport, table
from sarp_cluster.replay.traces import Trace, open_trace
from sarp_cluster.storage.verify import verify
from sarp_cluster.types import HashProfile, Namespace, NamespaceSpec, PrefixIndex

EXIT_ERROR: Final = 2
EXIT_DAMAGED: Final = 1
REPLAY_SECRET: Final = b"a replay can be repeated exactly"
"""Keys the block IDs of a replay's stores, which hold public traces: every run then has the same filters and keys."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells count."""


class OpenedIndex(PrefixIndex, Protocol):
    """An index that the command opened and has to close."""

    def create_namespace(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of `spec`, new or as it was."""

    async def close(self) -> None:
        """Make everything durable and let go of the directory."""


OpenIndex = Callable[[Path, IndexConfig], Awaitable[OpenedIndex]]


async def open_shard_index(directory: Path, config: IndexConfig) -> OpenedIndex:
    """Our own index. Imported when needed: the library does not depend on the services beside it."""
    from shard.index import Index  # noqa: PLC0415

    return await Index.open(directory, config, secret=REPLAY_SECRET)


def main(argv: Sequence[str] | None = None, *, open_index: OpenIndex = open_shard_index) -> int:
    """Run `sarp` and return its exit status: 0, 2 for an error, 130 when interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        status = arguments.run(arguments, open_index)
    except (SarpError, OSError) as error:
        print(f"sarp: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("sarp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status or 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="sarp", description="SARP Cluster: which KVCache prefix is held where?")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    replay = commands.add_parser(
        "replay",
        help="replay real traces against an index and compare each answer with the exact one",
        description="Replay traces against a fresh index on this machine: match each request's context, compare the "
        "answer with an exact oracle, insert what the request computed; then report quality, reads, memory and speed.",
    )
    add_replay_arguments(replay)
    replay.set_defaults(run=replay_command)
    verify_parser = commands.add_parser(
        "verify",
        help="look over a store that nobody has open: which file, which offset, what is wrong",
        description="Check every record of a store's log files and every segment they make up. Changes nothing. Exit "
        "status 0: all is well (a torn tail that was never acknowledged is named, and well); 1: something is wrong.",
    )
    verify_parser.add_argument("directory", type=Path, metavar="DIR", help="the store's directory")
    verify_parser.set_defaults(run=verify_command)
    return parser


def verify_command(arguments: argparse.Namespace, _: OpenIndex) -> int:
    """Look over a store and say what was found. Returns the exit status."""
    found = verify(arguments.directory)
    for finding in found.findings:
        kind = "torn tail" if finding.harmless else "DAMAGE"
        print(f"{kind}: {finding.file or 'store'} at offset {finding.offset:,}: {finding.what}")
    print(
        f"{found.files} log files, {found.bytes:,} bytes, last LSN {found.last_lsn:,}"
        + (f", {found.segments:,} segments, {found.blocks:,} blocks" if found.clean else "")
        + (": clean" if found.clean else ": DAMAGED")
    )
    return 0 if found.clean else EXIT_DAMAGED


def replay_command(arguments: argparse.Namespace, open_index: OpenIndex) -> None:
    """Replay each trace in its own fresh store and print the report."""
    config = index_config(arguments)
    reports: list[ReplayReport] = []
    with ExitStack() as cleanup:
        stores = arguments.store_dir
        if stores is None:
            stores = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="sarp-replay-")))
        for path in arguments.traces:
            trace = open_trace(path, block_tokens=arguments.block_tokens)
            store = fresh_directory(stores, trace.name)
            total = min(trace.request_count, arguments.limit or trace.request_count)
            # disable=None: shown where stderr is a terminal.
            with tqdm(total=total, desc=trace.name, unit="req", file=sys.stderr, mininterval=0.5, disable=None) as bar:
                report = _run(replay_in(store, trace, config, arguments, open_index=open_index, progress=bar.update))
            reports.append(report)
            if arguments.json:
                print(report.to_json(), flush=True)
    if not arguments.json:
        print(table(reports))
        print(EXPLANATION, end="")


def fresh_directory(parent: Path, name: str) -> Path:
    """Create the directory `name` in `parent`. Raises BadRequestError if it has something in it."""
    directory = parent / name
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise BadRequestError(
            f"--store-dir: {directory} is not empty; a replay measures a fresh index", field="store_dir"
        )
    return directory


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
    profile = HashProfile.XXH3 if trace.kind == "tokens" else HashProfile.OPAQUE
    index = await open_index(store, config)
    try:
        spec = NamespaceSpec(model=f"replay/{trace.name}", block_size=trace.block_tokens, hash_profile=profile)
        return await replay_trace(
            trace,
            index,
            index.create_namespace(spec),
            workers=arguments.workers,
            in_flight=arguments.in_flight,
            limit=arguments.limit,
            progress=progress,
            with_oracle=arguments.oracle,
            with_candidates=arguments.candidates,
            durable=arguments.durable,
        )
    finally:
        await index.close()


def _run(command: Coroutine[Any, Any, ReplayReport]) -> ReplayReport:
    """Run `command` to its end, on uvloop where there is one (not on Windows)."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.run(command)
    return uvloop.run(command)


if __name__ == "__main__":
    sys.exit(main())
