"""Loading what a snapshot left on the disk: rows and entries at their first touch, and the rest behind (design §5).

After a recovery from a snapshot neither the segment table nor the routing directory is in memory. A step of a search
that wants more than there is gives -1; `load_missed` reads what it wanted, in one helper thread, and the step is taken
again. Meanwhile the warmer loads the rest at its own pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from sarp_cluster import limits
from sarp_cluster.core.posting_run import PostingRun
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.segment_table import SegmentTable
from sarp_cluster.errors import CorruptRecordError, SnapshotDamagedError
from sarp_cluster.storage.run_file import FIRST_SLOT, PAGE_ROWS, Rows, RunFile, Slots, newest_rows
from sarp_cluster.storage.segment_store import SegmentStore


class _Read(NamedTuple):
    chunks: list[tuple[int, int, bytes]]
    pages: list[tuple[int, Slots, Rows]]


class Loader:
    """Brings chunks of runs and pages of rows into memory. Owned by the loop's thread."""

    def __init__(self, directory: RoutingDirectory, table: SegmentTable, store: SegmentStore) -> None:
        self._directory = directory
        self._table = table
        self._store = store
        self._files: dict[int, RunFile] = {}
        self._page_files: tuple[RunFile, ...] = ()
        self._hand = (0, 0)
        self.loads = 0
        """Chunks and pages loaded since the index was opened."""
        self.damage: SnapshotDamagedError | None = None
        """Why this snapshot cannot be used any more: the next recovery has to do without it."""

    def use(self, files: Sequence[RunFile]) -> None:
        """The run files of the snapshot that was opened, newest first."""
        self._files = {file.entry.number: file for file in files}
        self._page_files = tuple(files)

    @property
    def missed(self) -> bool:
        """Did the last step want what is not in memory?"""
        return bool(self._directory.missed or self._table.missed_count)

    @property
    def unloaded(self) -> int:
        """Chunks and pages that are not in memory."""
        return self._directory.unloaded + self._table.unloaded_pages

    async def load_missed(self) -> None:
        """Load what was wanted. Raises SnapshotDamagedError if it does not verify: from then on, always."""
        chunks, pages = self._directory.take_missed(), self._table.missed_pages()
        self._table.clear_missed()
        await self._load(chunks, pages)

    async def load_pages(self, pages: Iterable[int]) -> None:
        """Load those of these pages that are not in memory."""
        await self._load([], [page for page in pages if self._table.next_unloaded(page) == page])

    async def load_patched(self) -> None:
        """Load the pages that changed since the snapshot: the next one has to know their rows."""
        pages = self._table.pages_with_patches()
        for begin in range(0, len(pages), limits.LOAD_A_STEP):
            await self._load([], pages[begin : begin + limits.LOAD_A_STEP])

    async def load_runs(self, numbers: Collection[int]) -> None:
        """Load all chunks of these runs."""
        for run in self._directory.runs:
            while run.number in numbers and run.unloaded:
                await self._load(self._unloaded_chunks(run, limits.LOAD_A_STEP), [])

    async def load_all(self) -> None:
        """Load everything; for checks and tools."""
        while self.unloaded:
            await self.warm_step()

    async def warm_step(self) -> bool:
        """Load a few of what is not in memory yet. False when everything is."""
        pages: list[int] = []
        page = self._table.next_unloaded(0) if self._table.unloaded_pages else -1
        while page >= 0 and len(pages) < limits.LOAD_A_STEP:
            pages.append(page)
            page = self._table.next_unloaded(page + 1)
        chunks: list[tuple[int, int]] = []
        for run in self._directory.runs:
            chunks += self._unloaded_chunks(run, limits.LOAD_A_STEP - len(chunks) - len(pages))
        if not chunks and not pages:
            self._files.clear()
            self._page_files = ()
            return False
        await self._load(chunks, pages)
        return True

    @staticmethod
    def _unloaded_chunks(run: PostingRun, limit: int) -> list[tuple[int, int]]:
        """Up to `limit` chunks of a run that are not in memory, as (run, chunk)."""
        chunks: list[tuple[int, int]] = []
        chunk = run.next_unloaded(0) if run.unloaded else -1
        while chunk >= 0 and len(chunks) < limit:
            chunks.append((run.number, chunk))
            chunk = run.next_unloaded(chunk + 1)
        return chunks

    async def _load(self, chunks: list[tuple[int, int]], pages: list[int]) -> None:
        if self.damage is not None:
            raise self.damage
        try:
            read = await asyncio.get_running_loop().run_in_executor(None, self._read, chunks, pages)
        except SnapshotDamagedError as error:
            self.damage = error
            raise
        try:
            for number, chunk, data in read.chunks:
                self._directory.install_chunk(number, chunk, data)
            for page, slots, rows in read.pages:
                self._table.install_page(page, slots.data, rows.reshape(-1).data)
        except (CorruptRecordError, ValueError) as error:
            # The bytes are those that were written, but no part of this snapshot, or not with the log behind it.
            self.damage = SnapshotDamagedError(str(error))
            raise self.damage from error
        self._store.note_dead(self._table.take_replaced())
        self.loads += len(read.chunks) + len(read.pages)

    def _read(self, chunks: list[tuple[int, int]], pages: list[int]) -> _Read:
        """In a helper thread: first hints for everything, then the reads, so that the device works on all at once."""
        wanted = [(self._files[number], number, chunk) for number, chunk in chunks if number in self._files]
        slots = [(page, FIRST_SLOT + page * PAGE_ROWS) for page in pages]
        for file, _, chunk in wanted:
            file.will_need(chunk)
        for _, begin in slots:
            for file in self._page_files:
                file.will_need_slots(begin, begin + PAGE_ROWS)
        return _Read(
            [(number, chunk, file.posting_chunk(chunk)) for file, number, chunk in wanted],
            [(page, *newest_rows(self._page_files, begin, begin + PAGE_ROWS)) for page, begin in slots],
        )
