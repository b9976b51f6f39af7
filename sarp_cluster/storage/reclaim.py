"""Reclaiming the space of log files: what is decided, apart from what is done (design §5).

Log files are only appended to, so what was overwritten stays where it is until its file goes. A file goes once nothing
of it is needed: what segments point to is written anew at the log's end, the records in force of namespaces and workers
are put again, and all that is durable. Here is which file is next, how fast, which records are in force, and when
nobody reads a file any more; `shard.reclaim` does it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from sarp_cluster.storage.record import RecordType

LIVE_SHARE_MAX: Final = 0.5
"""A file of which no more is useful is worth rewriting at any time: it gives back what it costs, or more."""

PRESSED_SHARE_MAX: Final = 0.8
"""When the disk is full, files up to this share are rewritten: four bytes written for one gained."""

EARLY_CLOSE_PARTS: Final = 16
"""The open file may be closed early, to be rewritten, once its dead bytes are this part of a full file. Smaller stores
would need it sooner, but the log has only so many file numbers."""

FOREGROUND_FACTOR: Final = 8
"""Bytes that may be read and written here for each one that is appended by others. Where a file is rewritten for the
ratio's sake (share 1 / 1.4), a byte gained costs 3.5 read and 2.5 written: so what goes keeps up with what comes."""

FRAME_BYTES: Final = 32
"""Of each record, before its payload; both together are padded to a multiple of 8."""

SPARSE: Final = frozenset({RecordType.REMOVAL, RecordType.LOST})
"""Types of records that are few, while the numbers of what they are about are large."""

BURST_S: Final = 0.25
"""Seconds' worth of pace that may be saved up."""


class LogFile(NamedTuple):
    """A log file and what of it is of use."""

    number: int
    bytes: int
    header_bytes: int
    useful_bytes: int
    """Records that segments point to, records in force of namespaces and workers. Not the header."""

    @property
    def share(self) -> float:
        """Which part of it would have to be written again."""
        return (self.useful_bytes + self.header_bytes) / self.bytes


class Situation(NamedTuple):
    """What a choice depends on, besides the files."""

    ratio_max: float
    """Bytes of all files to useful ones: above it, files are rewritten."""
    file_bytes_max: int
    oldest_needed: int | None = None
    """Files from this number on are needed by the oldest kept snapshot; None: there is no snapshot."""
    free_bytes: int | None = None
    """Space left on the disk; None: not known."""
    pressed: bool = False
    """Inserts are refused for lack of space."""


def choose(files: Sequence[LogFile], situation: Situation, passed_over: Container[int] = ()) -> int | None:
    """The number of the file to reclaim next, the last of `files` being the open one; None: there is nothing to do.

    In this order: a file of which nothing is useful; the one with the least useful share, if that is at most half; the
    same if all files together are over the ratio, and its share is below the ratio's. Some file's is then. If it is the
    open one's, and that has enough dead bytes, it is to be closed: then it can be chosen, or once no snapshot needs it.
    """
    if not files:
        return None

    def may_go(file: LogFile) -> bool:
        return (
            file.number not in passed_over
            and (situation.oldest_needed is None or file.number < situation.oldest_needed)
            and (situation.free_bytes is None or file.useful_bytes <= situation.free_bytes)
        )

    open_file = files[-1]
    closed = [file for file in files[:-1] if may_go(file)]
    for file in closed:
        if file.useful_bytes == 0:
            return file.number
    useful = sum(file.useful_bytes + file.header_bytes for file in files)
    over = sum(file.bytes for file in files) > situation.ratio_max * useful
    share_max = LIVE_SHARE_MAX
    if over:
        share_max = 1 / situation.ratio_max
    if situation.pressed:
        share_max = max(share_max, PRESSED_SHARE_MAX)
    best = min(closed, key=lambda file: file.share, default=None)
    if best is not None and best.share <= share_max:
        return best.number
    dead = open_file.bytes - open_file.useful_bytes - open_file.header_bytes
    worth_closing = dead >= situation.file_bytes_max // EARLY_CLOSE_PARTS and open_file.share <= share_max
    return open_file.number if (over or situation.pressed) and worth_closing else None


class Pace:
    """How fast space is reclaimed: so many bytes a second, and more where the foreground appends more.

    Without the second part a store that is written to fast enough would grow without end.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._budget = 0.0
        self._now: float | None = None
        self._appended = 0

    def earn(self, now: float, appended: int) -> None:
        """Time has passed, and the foreground has appended so many bytes since the beginning."""
        if self._now is not None:
            earned = (now - self._now) * self._rate + (appended - self._appended) * FOREGROUND_FACTOR
            self._budget = min(self._rate * BURST_S, self._budget + earned)
        self._now, self._appended = now, appended

    def spend(self, amount: int) -> None:
        """So many bytes were read or written."""
        self._budget -= amount

    @property
    def wait_s(self) -> float:
        """Seconds until there is something to spend, if the foreground appends nothing."""
        return max(0.0, -self._budget / self._rate)


class RecordsInForce:
    """Where the newest record of each namespace, worker and worker's mark stands; an older one is of no use.

    So too of each slot's removal, and of what tells of each lost record: these are few, and their numbers large.

    Kept for what was put since the store was opened. Of what was recovered nothing is known (0), so it is put again
    when its file is reclaimed, and known from then on.
    """

    def __init__(self) -> None:
        self._place: dict[int, array[int]] = {}
        self._sparse: dict[tuple[int, int], int] = {}
        self._bytes: dict[int, int] = {}

    def put(self, kind: int, number: int, file: int, payload_bytes: int) -> None:
        """A record was appended to a file: it is the one in force from now on."""
        size = (FRAME_BYTES + payload_bytes + 7) & ~7
        if kind in SPARSE:
            self.end(kind, number)
            self._sparse[kind, number] = file << 16 | size >> 3
            self._bytes[file] = self._bytes.get(file, 0) + size
            return
        places = self._place.setdefault(kind, array("I"))
        if number >= len(places):
            places.extend([0] * (max(64, 2 * number) - len(places)))
        before = places[number]
        if before:
            self._bytes[before >> 16] -= (before & 0xFFFF) << 3
        places[number] = file << 16 | size >> 3
        self._bytes[file] = self._bytes.get(file, 0) + size

    def end(self, kind: int, number: int) -> None:
        """A removal, or what tells of a lost record, is not needed any more."""
        before = self._sparse.pop((kind, number), 0)
        if before:
            self._bytes[before >> 16] -= (before & 0xFFFF) << 3

    def stands_elsewhere(self, kind: int, number: int, file: int) -> bool:
        """Is the record in force known to stand in another file?"""
        if kind in SPARSE:
            return self._sparse.get((kind, number), 0) >> 16 not in (0, file)
        places = self._place.get(kind, ())
        return number < len(places) and places[number] >> 16 not in (0, file)

    def bytes_in(self, file: int) -> int:
        """Bytes of records in force in a file, as far as known."""
        return self._bytes.get(file, 0)

    def forget(self, file: int) -> None:
        """The file is gone."""
        for kind, number in list(self._sparse):
            if kind == RecordType.LOST and number >> 48 == file:
                self.end(kind, number)
        self._bytes.pop(file, None)


class ReadEpochs:
    """Which reads are in flight, so that a file is closed only when none of them may still want it.

    An epoch ends whenever a file is retired. A read belongs to the epoch in which it began and may want what was
    retired then or later; what was retired before, nothing pointed to any more when it began.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._in_flight: dict[int, int] = {}
        self._retired: deque[tuple[int, int]] = deque()

    def begin(self) -> int:
        """A read begins. Returns what `end` is to be given."""
        self._in_flight[self._epoch] = self._in_flight.get(self._epoch, 0) + 1
        return self._epoch

    def end(self, epoch: int) -> None:
        """A read is done."""
        left = self._in_flight[epoch] - 1
        if left:
            self._in_flight[epoch] = left
        else:
            del self._in_flight[epoch]

    def retire(self, number: int) -> None:
        """Nothing points to this file any more."""
        self._retired.append((self._epoch, number))
        self._epoch += 1

    def unread(self) -> list[int]:
        """Take out the files that no read wants any more."""
        oldest = min(self._in_flight, default=self._epoch)
        numbers = []
        while self._retired and self._retired[0][0] < oldest:
            numbers.append(self._retired.popleft()[1])
        return numbers
