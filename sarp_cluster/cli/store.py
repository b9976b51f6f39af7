"""`sarp verify`, `sarp dump`, `sarp load`: a store that nobody has open."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from sarp_cluster.cli.terminal import Commands, progress_bar, run_loop, whole_file
from sarp_cluster.core.namespace import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from sarp_cluster.errors import BadRequestError
from sarp_cluster.replay.replay import Progress
from sarp_cluster.storage.store_directory import SECRET_NAME
from sarp_cluster.storage.verify import verify

EXIT_DAMAGED: Final = 1
REPLAY_SECRET: Final = b"a replay can be repeated exactly"
"""Keys the block IDs of a replay's stores, which hold public traces: every run then has the same filters and keys."""


def add_commands(commands: Commands) -> None:
    """Add the three."""
    verify_parser = commands.add_parser(
        "verify",
        help="look over a store that nobody has open: which file, which offset, what is wrong",
        description="Check every record of a store's log files and every segment they make up. Changes nothing. Exit "
        "status 0: all is well (a torn tail that was never acknowledged is named, and well); 1: something is wrong.",
    )
    verify_parser.add_argument("directory", type=Path, metavar="DIR", help="the store's directory")
    verify_parser.set_defaults(run=verify_command)
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


def dump_command(arguments: argparse.Namespace) -> None:
    """Write the dump of a store to a file, or to stdout."""
    from shard.dump_files import dump_store  # noqa: PLC0415

    directory = arguments.directory
    secret = _secret(arguments.secret)
    if secret is None and not (directory / SECRET_NAME).exists():
        secret = REPLAY_SECRET
    with ExitStack() as cleanup:
        bar = cleanup.enter_context(progress_bar(str(directory), "segment"))

        def begin(total: int) -> Progress:
            bar.reset(total)
            return bar.update  # type: ignore[no-any-return]

        output = sys.stdout.buffer
        if arguments.output is not None:
            output = cleanup.enter_context(whole_file(arguments.output))
        run_loop(dump_store(directory, output, secret, begin))


def load_command(arguments: argparse.Namespace) -> None:
    """Make a store of a dump from a file, or from stdin."""
    from shard.dump_files import load_store  # noqa: PLC0415

    with ExitStack() as cleanup:
        source: BinaryIO = sys.stdin.buffer
        total = None
        if arguments.file is not None:
            source = cleanup.enter_context(arguments.file.open("rb"))
            total = os.fstat(source.fileno()).st_size
        bar = cleanup.enter_context(progress_bar(str(arguments.directory), "B", total))
        loaded = run_loop(load_store(arguments.directory, source, _secret(arguments.secret), bar.update))
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


def verify_command(arguments: argparse.Namespace) -> int:
    """Look over a store and say what was found. Returns the exit status."""
    with progress_bar(str(arguments.directory), "B") as bar:

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
