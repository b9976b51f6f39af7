"""What happened in a cluster, for people to read: the newest events in memory and, a moment later, in a file.

The file has one JSON object a line and is there for a look after the fact, not for recovery: it is not synced, a torn
line is passed over, and a disk that fails costs lines, never the coordinator. It is rotated after as many events as are
kept: one older file stays beside it, with `.1` behind its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiofiles
import aiofiles.os
import msgspec

from sarp_cluster import limits
from sarp_cluster.types import Event

logger: Final = logging.getLogger(__name__)

LINE_BYTES_MAX: Final = 8 * limits.EVENT_TEXT_MAX + 16 * limits.NAME_BYTES_MAX
"""A character takes up to six bytes in JSON."""

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Event)


class Timeline:
    """The events. Make one with `open`; `run` writes them, `close` what is left."""

    def __init__(self, path: Path | None, wall_clock: Callable[[], float], kept: int) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._kept = kept
        self._events: deque[Event] = deque(maxlen=kept)
        self._unwritten: deque[Event] = deque(maxlen=kept)
        self._next = 1
        self._lines = 0
        """In the present file."""
        self._torn = False
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()  # held across our own disk only
        self.failed = 0
        """Times that events could not be written."""

    @classmethod
    async def open(
        cls, path: Path | None, *, wall_clock: Callable[[], float], kept: int = limits.EVENTS_KEPT
    ) -> Timeline:
        """The events of a file that may be there, and room for more. Without a path they are in memory only."""
        timeline = cls(path, wall_clock, kept)
        if path is not None:
            for file in (_older(path), path):
                lines, timeline._torn = await _read(file, kept)
                timeline._lines = len(lines)
                for line in lines:
                    timeline._reload(line)
        return timeline

    def _reload(self, line: bytes) -> None:
        try:
            event = _decoder.decode(line)
        except msgspec.DecodeError:
            return  # torn, or not ours
        if event.number >= self._next:  # one that was written twice, because the first time looked like a failure
            self._events.append(event)
            self._next = event.number + 1

    def note(self, node: str, kind: str, text: str) -> Event:
        """Something happened."""
        event = Event(
            number=self._next, time=self._wall_clock(), node=node, kind=kind, text=text[: limits.EVENT_TEXT_MAX]
        )
        self._next += 1
        self._events.append(event)
        if self._path is not None:
            self._unwritten.append(event)
            self._wake.set()
        return event

    @property
    def last(self) -> int:
        """Number of the last event; 0: there was none."""
        return self._next - 1

    def after(self, number: int, limit: int) -> list[Event]:
        """Up to so many events that follow a number, oldest first. Older ones than are kept are missing."""
        first = self._events[0].number if self._events else self._next
        begin = max(0, number + 1 - first)
        return [self._events[at] for at in range(begin, min(len(self._events), begin + limit))]

    async def run(self) -> None:
        """Write events as they come, for ever."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write what is not written yet."""
        async with self._writing:
            self._wake.clear()
            if self._path is None or not self._unwritten:
                return
            appending = asyncio.ensure_future(self._append(self._path, list(self._unwritten)))
            try:
                await asyncio.shield(appending)
            except asyncio.CancelledError:
                # A file that is being opened has to be closed, and lines that are written not written again.
                while not appending.done():
                    try:
                        await asyncio.wait([appending])
                    except asyncio.CancelledError:
                        pass  # we are about to raise the first one
                raise

    async def _append(self, path: Path, batch: list[Event]) -> None:
        try:
            if self._lines >= self._kept:
                await aiofiles.os.replace(path, _older(path))
                self._lines, self._torn = 0, False
            data = b"".join(_encoder.encode(event) + b"\n" for event in batch)
            # In one go: a file that is opened in a thread for whoever is cancelled meanwhile is closed by nobody.
            await asyncio.to_thread(_append_to, path, b"\n" + data if self._torn else data)
        except OSError as error:
            self.failed += 1
            self._torn = True
            logger.warning("the timeline cannot be written, it goes on in memory: %s", error)
            return  # the next event tries again
        self._lines += len(batch)
        self._torn = False
        while self._unwritten and self._unwritten[0].number <= batch[-1].number:
            self._unwritten.popleft()

    async def close(self) -> None:
        """Write what is left."""
        await self.flush()


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _append_to(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


async def _read(path: Path, kept: int) -> tuple[list[bytes], bool]:
    """The lines of a file, from the end as many as may be wanted; and whether the last one is torn."""
    try:
        async with aiofiles.open(path, "rb") as file:
            size = await file.seek(0, 2)
            await file.seek(max(0, size - 2 * kept * LINE_BYTES_MAX))
            data: bytes = await file.read()
    except FileNotFoundError:
        return [], False
    lines = data.split(b"\n")
    return [line for line in lines if line], bool(lines[-1])
