"""`sarp load`: an index from the lines that `shard.dump` wrote, or that another program wrote in that format.

Everything goes in through the ways that callers have, `insert` and `remove`; only blocks that nobody holds need one of
their own (`insert_path.add_blocks`). Each field is checked; an error names the line and the field. What is in memory is
one line, and a number for each namespace and worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sarp_cluster import limits
from sarp_cluster.errors import DumpError, RequestError
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker
from shard import insert_path
from shard.dump import FORMAT, FORMAT_VERSION, TIER_NAMES
from shard.dump_line import BLOCK_ID_BYTES, DumpLine
from shard.index import Index
from shard.namespaces import IndexNamespace

Progress = Callable[[int], object]
"""Told how many bytes more are done."""

SEQUENCES_A_TURN: Final = 16
"""Background work of the index gets a turn after so many lines."""
ORDER: Final = ("header", "namespace", "worker", "sequence", "end")


def segment_blocks_of(line: bytes) -> int:
    """Blocks a segment of the store that a dump with this first line was made of. Raises DumpError for another file."""
    fields = DumpLine(1, line)
    if fields.kind != "header" or fields.text("format") != FORMAT:
        raise DumpError(f'line 1: not a dump: it does not begin with {{"type":"header","format":"{FORMAT}",...}}')
    version = fields.integer("version", 0, 2**31)
    if version != FORMAT_VERSION:
        raise DumpError(
            f"line 1: field version: {version}; this program reads version {FORMAT_VERSION}: use a newer program"
        )
    blocks = fields.integer("segment_blocks", 1, limits.SEGMENT_BLOCKS_MAX)
    fields.finish()
    return blocks


class Loader:
    """One dump on its way into one new, empty index. Give it each line in order, then `finish`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lines = 0
        self._stage = 0
        self._namespaces: list[IndexNamespace] = []
        self._workers: list[tuple[Worker, int]] = []
        self.sequences = 0
        self.blocks = 0
        self.locations = 0

    async def take(self, line: bytes) -> None:
        """Enter what a line says. Raises DumpError for one that makes no sense here."""
        self._lines += 1
        if self._lines == 1:
            segment_blocks_of(line)
            return
        fields = DumpLine(self._lines, line)
        stage = ORDER.index(fields.kind) if fields.kind in ORDER else 0
        if stage == 0:
            raise fields.error("type", f"{fields.kind!r} is not one of {', '.join(ORDER[1:])}")
        if stage < self._stage or self._stage == len(ORDER) - 1:
            raise fields.error("type", f"{fields.kind} after {ORDER[self._stage]}")
        self._stage = stage
        try:
            if fields.kind == "namespace":
                self._namespace(fields)
            elif fields.kind == "worker":
                await self._worker(fields)
            elif fields.kind == "sequence":
                await self._sequence(fields)
            else:
                self._end(fields)
        except RequestError as error:
            raise DumpError(f"line {self._lines}: {error}") from error
        fields.finish()

    def finish(self) -> None:
        """The dump is over. Raises DumpError if it was cut off before its end."""
        if self._stage != len(ORDER) - 1:
            raise DumpError(f"the dump ends at line {self._lines} without its last line: it was cut off")

    def _namespace(self, line: DumpLine) -> None:
        line.number("namespace", len(self._namespaces) + 1)
        spec = NamespaceSpec(
            tenant=line.text("tenant"),
            model=line.text("model"),
            lora=line.text("lora"),
            salt=line.text("salt"),
            block_size=line.integer("block_size", 1, limits.BLOCK_TOKENS_MAX),
            hash_profile=HashProfile(line.choice("hash_profile", tuple(HashProfile))),
        )
        if any(spec == known.spec for known in self._index.namespaces):
            raise line.error("namespace", "the same as an earlier one in all its fields")
        self._namespaces.append(self._index.create_namespace(spec))

    async def _worker(self, line: DumpLine) -> None:
        line.number("worker", len(self._workers))
        worker = Worker(line.text("instance_id"), line.integer("dp_rank", 0, limits.DP_RANK_MAX))
        generation = line.integer("generation", 0, limits.GENERATION_MAX)
        seq = None if line.is_null("seq") else line.integer("seq", 0, limits.SEQ_MAX)
        if self._index.state.workers.find(*worker) is not None:
            raise line.error("instance_id", "the same worker as an earlier one")
        if self._namespaces:
            # A removal from an index without a block removes nothing, and leaves the worker as the line says.
            nothing = bytes(BLOCK_ID_BYTES)
            await self._index.remove(
                self._namespaces[0], nothing, worker=worker, generation=generation, seq=seq, durable=False
            )
        elif seq is not None:
            raise line.error("seq", "there is no namespace in which the worker could have changed anything")
        else:
            await self._index.clear_worker(worker, generation=generation)
        self._workers.append((worker, generation))

    async def _sequence(self, line: DumpLine) -> None:
        size = self._index.state.config.segment_blocks
        namespace = self._namespaces[line.integer("namespace", 1, len(self._namespaces)) - 1]
        offset = line.integer("offset", 0, limits.REQUEST_BLOCKS_MAX)
        if offset % size:
            raise line.error("offset", f"{offset} is not a multiple of {size}, the blocks of a segment")
        wire = line.block_ids("blocks")
        end = offset + len(wire) // BLOCK_ID_BYTES
        lowest = offset + size if offset else 0
        if end <= lowest:
            raise line.error("blocks", f"they end at position {end}; new ones begin at {lowest} or later")
        first = line.integer("first", lowest, end - 1)
        found = list(line.objects("locations"))
        places = [self._location(location, first, end) for location in found]
        # All blocks first, by the location that reaches the end if there is one: then no segment has to grow.
        places.sort(key=lambda place: (-place[2], place[1]))
        added = 0
        if not places or places[0][2] < end:
            added = await insert_path.add_blocks(self._index.state, namespace, wire, offset=offset)
        for number, begin, until, tier, handle in places:
            worker, generation = self._workers[number]
            result = await self._index.insert(
                namespace,
                wire[: (until - offset) * BLOCK_ID_BYTES],
                worker=worker,
                generation=generation,
                tier=tier,
                first=begin,
                offset=offset,
                handle=handle,
                durable=False,
            )
            added += result.blocks_added
        if added != end - first:
            raise line.error(
                "blocks",
                f"{end - first} are new from position {first} on, but {added} were: an earlier line is missing, or "
                f"this one stands twice",
            )
        self.sequences += 1
        self.blocks += added
        self.locations += len(places)

    def _location(self, line: DumpLine, first: int, end: int) -> tuple[int, int, int, Tier, int | None]:
        worker = line.integer("worker", 0, len(self._workers) - 1)
        tier = Tier(TIER_NAMES.index(line.choice("tier", TIER_NAMES)))
        begin = line.integer("first", first, end - 1)
        count = line.integer("count", 1, end - begin)
        handle = line.handle("handle") if line.has("handle") else None
        line.finish()
        return worker, begin, begin + count, tier, handle

    def _end(self, line: DumpLine) -> None:
        for name, count in (
            ("namespaces", len(self._namespaces)),
            ("workers", len(self._workers)),
            ("sequences", self.sequences),
            ("blocks", self.blocks),
            ("locations", self.locations),
        ):
            told = line.integer(name, 0, 2**63)
            if told != count:
                raise line.error(name, f"{told}, but there were {count}: lines are missing")
