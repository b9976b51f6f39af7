"""What all commands share: the loop they run on, progress bars, files that are there as a whole."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

Result = TypeVar("Result")


class LazyParser(argparse.ArgumentParser):
    """A parser whose arguments may be added when it is used: those of a service come with all that it imports."""

    fill: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401
        """See argparse."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(args, namespace)


Commands: TypeAlias = "argparse._SubParsersAction[LazyParser]"


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


def progress_bar(title: str, unit: str, total: int | None = None) -> tqdm:
    """A progress bar on stderr, where that is a terminal."""
    scale = unit == "B"
    return tqdm(desc=title, total=total, unit=unit, unit_scale=scale, file=sys.stderr, mininterval=0.5, disable=None)


def run_loop(command: Coroutine[Any, Any, Result]) -> Result:
    """Run `command` to its end, on uvloop where there is one (not on Windows)."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.run(command)
    return uvloop.run(command)


def aligned(rows: Sequence[Sequence[object]]) -> str:
    """A table: the first column to the left, the others to the right, numbers with thousands divided."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = []
    for name, *cells in texts:
        lines.append("  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))
    return "".join(f"{line.rstrip()}\n" for line in lines)
