"""The `sarp` command. Each subcommand adds its parser and names the function that runs it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, Final, Protocol, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from sarp_cluster.config import IndexConfig
from sarp_cluster.core.namespace import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from sarp_cluster.errors import BadRequestError, SarpError
from sarp_cluster.replay.arguments import add_replay_arguments, index_config
from sarp_cluster.replay.replay import Progress, replay_trace
from sarp_cluster.replay.report import EXPLANATION, FoundStore, ReplayReport, table
from sarp_cluster.replay.traces import Trace, open_trace
from sarp_cluster.storage.store_directory import SECRET_NAME
from sarp_cluster.storage.verify import verify
from sarp_cluster.types import HashProfile, Namespace, NamespaceSpec, PrefixIndex, Worker, WorkerMark

EXIT_ERROR: Final = 2
EXIT_DAMAGED: Final = 1
REPLAY_SECRET: Final = b"a replay can be repeated exactly"
"""Keys the block IDs of a replay's stores, which hold public traces: every run then has the same filters and keys."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells count."""


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


Result = TypeVar("Result")
OpenIndex = Callable[[Path, IndexConfig], Awaitable[OpenedIndex]]


async def open_shard_index(directory: Path, config: IndexConfig) -> OpenedIndex:
    """Our own index. Imported when needed: the library does not depend on the services beside it."""
    from shard.reopened import ReopenedIndex  # noqa: PLC0415

    own_secret = await asyncio.to_thread((directory / SECRET_NAME).exists)
    return await ReopenedIndex.open(directory, config, secret=None if own_secret else REPLAY_SECRET)


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
        description="Replay traces against an index on this machine: match each request's context, compare the answer "
        "with an exact oracle, insert what the request computed; then report quality, reads, memory and speed. The "
        "index is empty at first, unless --store-dir has a store of the trace already.",
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
    _add_dump_and_load(commands)
    return parser


def _add_dump_and_load(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    dump_parser = commands.add_parser(
        "dump",
        help="write all that a store holds as lines of JSON, independent of its secret",
        description="Write a store as lines of JSON: namespaces, workers with their generations, and each sequence's "
        "block IDs (wire IDs, as callers know them) with who holds which blocks on which tier. `sarp load` makes a "
        "store of it again that gives the same answers. Every field: docs/dump.md. The store must not be open.",
    )
    dump_parser.add_argument("directory", type=Path, metavar="DIR", help="the store's directory")
    dump_parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write it; there when it is complete (default: stdout)"
    )
    _add_secret(
        dump_parser,
        "with the secret (16 to 64 bytes) that keys the store's block IDs, where its owner gave one (default: the "
        "store's own; for a store of `sarp replay` that of all replays)",
    )
    dump_parser.set_defaults(run=dump_command)
    load_parser = commands.add_parser(
        "load",
        help="make a store of what `sarp dump` wrote",
        description="Make a new store of a dump, in a directory that is empty or absent. Every field is checked; an "
        "error names line and field, and leaves no store behind.",
    )
    load_parser.add_argument("directory", type=Path, metavar="DIR", help="the new store's directory")
    load_parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the dump (default: stdin)")
    _add_secret(
        load_parser, "with a secret (16 to 64 bytes) to key the store's block IDs (default: the store makes its own)"
    )
    load_parser.set_defaults(run=load_command)


def _add_secret(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--secret", type=Path, metavar="FILE", help=f"a file {what}")


def dump_command(arguments: argparse.Namespace, _: OpenIndex) -> None:
    """Write the dump of a store to a file, or to stdout."""
    from shard.dump_files import dump_store  # noqa: PLC0415

    directory = arguments.directory
    secret = _secret(arguments.secret)
    if secret is None and not (directory / SECRET_NAME).exists():
        secret = REPLAY_SECRET
    with ExitStack() as cleanup:
        bar = cleanup.enter_context(_bar(str(directory), "segment"))

        def begin(total: int) -> Progress:
            bar.reset(total)
            return bar.update  # type: ignore[no-any-return]

        output = sys.stdout.buffer
        if arguments.output is not None:
            output = cleanup.enter_context(whole_file(arguments.output))
        _run(dump_store(directory, output, secret, begin))


def load_command(arguments: argparse.Namespace, _: OpenIndex) -> None:
    """Make a store of a dump from a file, or from stdin."""
    from shard.dump_files import load_store  # noqa: PLC0415

    with ExitStack() as cleanup:
        source: BinaryIO = sys.stdin.buffer
        total = None
        if arguments.file is not None:
            source = cleanup.enter_context(arguments.file.open("rb"))
            total = os.fstat(source.fileno()).st_size
        bar = cleanup.enter_context(_bar(str(arguments.directory), "B", total))
        loaded = _run(load_store(arguments.directory, source, _secret(arguments.secret), bar.update))
    print(
        f"{arguments.directory}: {loaded.blocks:,} blocks in {loaded.sequences:,} sequences, "
        f"{loaded.locations:,} locations"
    )


def _secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    secret = path.read_bytes()
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise BadRequestError(
            f"--secret: {path} has {len(secret)} bytes, not {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}", field="secret"
        )
    return secret


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, for its owner only, that is there when all of it is written and synced, or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _bar(title: str, unit: str, total: int | None = None) -> tqdm:
    """A progress bar on stderr, where that is a terminal."""
    scale = unit == "B"
    return tqdm(desc=title, total=total, unit=unit, unit_scale=scale, file=sys.stderr, mininterval=0.5, disable=None)


def verify_command(arguments: argparse.Namespace, _: OpenIndex) -> int:
    """Look over a store and say what was found. Returns the exit status."""
    with _bar(str(arguments.directory), "B") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = verify(arguments.directory, progress)
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
    """Replay each trace in its own store and print the report."""
    config = index_config(arguments)
    reports: list[ReplayReport] = []
    with ExitStack() as cleanup:
        stores = arguments.store_dir
        if stores is None:
            stores = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="sarp-replay-")))
        for path in arguments.traces:
            trace = open_trace(path, block_tokens=arguments.block_tokens)
            store = stores / trace.name
            store.mkdir(parents=True, exist_ok=True)
            total = min(trace.request_count, arguments.limit or trace.request_count)
            with _bar(trace.name, "req", total) as bar:
                report = _run(replay_in(store, trace, config, arguments, open_index=open_index, progress=bar.update))
            reports.append(report)
            if arguments.json:
                print(report.to_json(), flush=True)
    if not arguments.json:
        print(table(reports))
        print(EXPLANATION, end="")


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
    opening = perf_counter()
    index = await open_index(store, config)
    recovery_s = perf_counter() - opening
    try:
        spec = NamespaceSpec(model=f"replay/{trace.name}", block_size=trace.block_tokens, hash_profile=profile)
        namespace = index.create_namespace(spec)
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


def _run(command: Coroutine[Any, Any, Result]) -> Result:
    """Run `command` to its end, on uvloop where there is one (not on Windows)."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.run(command)
    return uvloop.run(command)


if __name__ == "__main__":
    sys.exit(main())
