"""Any operations in any order: the index answers as the brute-force oracle does.

Without a cap on retrieval the answer is the oracle's. With one it may end earlier: then it is the oracle's answer to
the shorter query, and the wave goes at least as far as the paper's way, window by window. When routing keys and filters
are cut to a few bits, so that everything collides, it may end earlier too, but there is never a wrong block, never a
foreign location. The index checks its own invariants after each step. Closing, crashing and opening again changes no
answer; neither does a dump that is loaded under another secret, and dumped again it is the same, line by line.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, invariant, multiple, rule

from sarp_cluster.config import IndexConfig, Strategy
from sarp_cluster.errors import RequestError
from sarp_cluster.testing.reference_index import Answer, ReferenceIndex, chained_block_ids
from sarp_cluster.types import Worker
from shard.dump import dump
from shard.index import Index
from shard.load import Loader
from tests.property import scenarios
from tests.property.scenarios import DEFAULTS, NAMESPACES, WORKERS, Change, Question, Tokens

Expected = TypeVar("Expected")
Got = TypeVar("Got")

SEQ_FIRST = 1_000  # a worker's numbers may start anywhere


async def _dumped(index: Index) -> list[bytes]:
    return [line async for line in dump(index)]


async def _load(index: Index, lines: list[bytes]) -> None:
    loader = Loader(index)
    for line in lines:
        await loader.take(line)
    loader.finish()
    await index.store.sync()


class IndexMachine(RuleBasedStateMachine):
    """One index and one oracle to which the same happens. Subclasses say with which settings."""

    configs: ClassVar[st.SearchStrategy[IndexConfig]]
    stretch: ClassVar[int] = 1
    """Multiplies the lengths of sequences, so that they fit the segments."""

    sequences = Bundle("sequences")
    positions = st.integers(0, 1_000)  # taken modulo what there is
    suffixes = scenarios.runs()
    forks = st.lists(st.tuples(positions, suffixes), min_size=2, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()  # an event loop of its own
        self._directory = tempfile.TemporaryDirectory()
        self._index: Index | None = None
        self._known: set[Tokens] = set()
        self.secret = scenarios.SECRET

    @initialize(
        target=sequences, data=st.data(), tokens=scenarios.runs(min_size=1), forks=forks, change=scenarios.changes
    )
    def open_index(
        self, data: st.DataObject, tokens: Tokens, forks: list[tuple[int, Tokens]], change: Change
    ) -> MultipleResults[Tokens]:
        """The index is not empty when the rules begin: few of what they do is of interest then."""
        self.config = data.draw(self.configs)
        note(f"{self.config}")
        self.reference = ReferenceIndex()
        self._open()
        self.reference_namespaces = [self.reference.create_namespace(spec) for spec in NAMESPACES]
        return self._insert_forks(self._insert(self._stretched(tokens), change, first=0), forks, change)

    def teardown(self) -> None:
        try:
            if self._index is not None:
                self._run(self._index.close())
        finally:
            self._runner.close()
            self._directory.cleanup()

    @property
    def index(self) -> Index:
        assert self._index is not None
        return self._index

    # What happens.

    @rule(target=sequences, tokens=scenarios.runs(min_size=1), first=st.just(0) | positions, change=scenarios.changes)
    def insert_new(self, tokens: Tokens, first: int, change: Change) -> Tokens:
        return self._insert(self._stretched(tokens), change, first=first)

    @rule(target=sequences, base=sequences, cut=positions, suffix=suffixes, change=scenarios.changes)
    def insert_branch(self, base: Tokens, cut: int, suffix: Tokens, change: Change) -> Tokens:
        """Again, shorter, extended, or parting from `base` anywhere; held from the beginning."""
        return self._insert(self._branch(base, cut, suffix) or base, change, first=0)

    @rule(target=sequences, base=sequences, forks=forks, change=scenarios.changes)
    def insert_forks(self, base: Tokens, forks: list[tuple[int, Tokens]], change: Change) -> MultipleResults[Tokens]:
        """Several that share the beginning of `base`: posting lists grow beyond the thresholds."""
        return self._insert_forks(base, forks, change)

    @rule(target=sequences, base=sequences, suffix=suffixes, first=positions, change=scenarios.changes)
    def insert_extension(self, base: Tokens, suffix: Tokens, first: int, change: Change) -> Tokens:
        """A worker that holds some of what `base` and a continuation have."""
        return self._insert(base + self._stretched(suffix), change, first=first)

    @rule(base=sequences, cut=positions, suffix=suffixes, window=positions, first=positions, change=scenarios.changes)
    def insert_from_offset(
        self, base: Tokens, cut: int, suffix: Tokens, window: int, first: int, change: Change
    ) -> None:
        """Only the end of a sequence: refused when the beginning is not there."""
        tokens = self._branch(base, cut, suffix)
        segment_blocks = self.config.segment_blocks
        windows = (len(tokens) - 1) // segment_blocks - 1  # offsets that leave a whole window before `first`
        if windows < 1:
            return
        offset = segment_blocks * (1 + window % windows)
        self._insert(tokens, change, first=offset + segment_blocks + first, offset=offset)

    @rule(
        base=sequences,
        cut=positions,
        first=positions,
        last=positions,
        every_tier=st.booleans(),
        change=scenarios.changes,
    )
    def remove(self, base: Tokens, cut: int, first: int, last: int, every_tier: bool, change: Change) -> None:
        tokens = self._branch(base, cut, ())
        if not tokens:
            return
        first %= len(tokens)
        last = first + 1 + last % (len(tokens) - first)
        arguments = self._arguments(change, first=first, last=last)
        if every_tier:
            arguments["tier"] = None
        block_ids = chained_block_ids(tokens)
        self._both(
            lambda: self.reference.remove(self.reference_namespaces[change.namespace], block_ids, **arguments),
            self.index.remove(self.namespaces[change.namespace], block_ids, **arguments),
        )

    @rule(worker=st.sampled_from(WORKERS), step=st.sampled_from((1, 1, 2, 0, -1)))
    def clear_worker(self, worker: Worker, step: int) -> None:
        generation = max(0, self.reference.generation(worker) + step)
        self._both(
            lambda: self.reference.clear_worker(worker, generation=generation),
            self.index.clear_worker(worker, generation=generation),
        )

    @rule()
    def take_a_background_step(self) -> None:
        self._run(self.index.backfill_step())

    @rule()
    def finish_background_work(self) -> None:
        self._run(self.index.drain_backfill())
        assert self.index.statistics().backfills_pending == 0
        assert not self._run(self.index.backfill_step())
        self.match_everything()

    @rule()
    def snapshot(self) -> None:
        self._run(self.index.snapshot())

    @rule()
    def reopen(self) -> None:
        """What recovery does not find again, every later question asks about."""
        self._run(self.index.close())
        self._open()
        self.match_everything()

    @rule(manifests=st.integers(0, 1))
    def reopen_with_fewer_snapshots(self, manifests: int) -> None:
        """From the one before the newest, with more of the log to replay; or from the log alone."""
        self._run(self.index.close())
        for path in sorted(Path(self._directory.name).glob("manifest-*.sarp"))[manifests:]:
            path.unlink()
        self._open()
        self.match_everything()

    @rule(target=sequences, base=sequences, forks=forks, change=scenarios.changes)
    def reopen_and_insert(
        self, base: Tokens, forks: list[tuple[int, Tokens]], change: Change
    ) -> MultipleResults[Tokens]:
        """Changes of an index of which nothing is in memory yet."""
        self._run(self.index.snapshot())
        self._run(self.index.close())
        self._open()
        return self._insert_forks(base, forks, change)

    @rule(synced=st.booleans())
    def crash(self, synced: bool) -> None:
        """Go on with the files as they are now: all that was acknowledged is in them, synced once more or not."""
        if synced:
            self._run(self.index.store.sync())
        abandoned, self._directory = self._directory, tempfile.TemporaryDirectory()
        for path in Path(abandoned.name).iterdir():
            shutil.copy(path, self._directory.name)
        self._run(self.index.close())
        abandoned.cleanup()
        self._open()
        self.match_everything()

    @rule()
    def dump_and_load(self) -> None:
        """Go on with what a dump, loaded under another secret, makes of the index."""
        lines = self._run(_dumped(self.index))
        abandoned, self._directory = self._directory, tempfile.TemporaryDirectory()
        self._run(self.index.close())
        abandoned.cleanup()
        self.secret = bytes(reversed(self.secret))
        self._open(with_namespaces=False)
        self._run(_load(self.index, lines))
        self.namespaces = [self.index.create_namespace(spec) for spec in NAMESPACES]
        self._check_dumped_again(lines)
        self.match_everything()

    # What is asked.

    @rule(base=sequences, cut=positions, suffix=suffixes, question=scenarios.questions)
    def match(self, base: Tokens, cut: int, suffix: Tokens, question: Question) -> None:
        self._check_match(self._branch(base, cut, suffix), question)

    @rule(tokens=suffixes, question=scenarios.questions)
    def match_something_else(self, tokens: Tokens, question: Question) -> None:
        self._check_match(self._stretched(tokens), question)

    @rule()
    def match_everything(self) -> None:
        for namespace in range(len(NAMESPACES)):
            for tokens in sorted(self._known):
                self._check_match(tokens, Question(namespace))

    # What always holds.

    @invariant()
    def invariants_hold(self) -> None:
        self._run(self.index.validate())

    @invariant()
    def each_block_is_counted_once(self) -> None:
        assert self.index.statistics().blocks == self.reference.block_count()

    # How it is done.

    def _check_dumped_again(self, lines: list[bytes]) -> None:
        assert self._run(_dumped(self.index)) == lines

    def _open(self, *, with_namespaces: bool = True) -> None:
        self._index = None
        self._index = self._run(Index.open(Path(self._directory.name), self.config, secret=self.secret))
        # Background work happens by the rules alone: a back-fill that is published between two matches that are
        # compared would let the later one, capped, find more.
        self._run(self.index.stop_background())
        if with_namespaces:
            self.namespaces = [self.index.create_namespace(spec) for spec in NAMESPACES]

    def _run(self, awaitable: Coroutine[Any, Any, Got]) -> Got:
        return self._runner.run(awaitable)

    def _both(
        self, expected: Callable[[], Expected], got: Coroutine[Any, Any, Got]
    ) -> tuple[Expected, Got] | tuple[None, None]:
        """Do it to both: both do it, or both refuse for the same reason."""
        try:
            wanted = expected()
        except RequestError as error:
            refusal = error
        else:
            return wanted, self._run(got)
        with pytest.raises(type(refusal)) as raised:
            self._run(got)
        assert raised.value.field == refusal.field
        return None, None

    def _stretched(self, tokens: Tokens) -> Tokens:
        return tuple(token for token in tokens for _ in range(self.stretch))

    def _branch(self, base: Tokens, cut: int, suffix: Tokens) -> Tokens:
        return base[: len(base) - cut % (len(base) + 1)] + self._stretched(suffix)

    def _arguments(self, change: Change, **positions: int) -> dict[str, Any]:
        """What inserts and removals have in common."""
        generation = max(0, self.reference.generation(change.worker) + change.generation_step)
        last = self.reference.last_seq(change.worker)
        seq = None if change.seq_step is None else (SEQ_FIRST if last is None else last) + change.seq_step
        return {"worker": change.worker, "generation": generation, "tier": change.tier, "seq": seq, **positions}

    def _insert(self, tokens: Tokens, change: Change, *, first: int, offset: int = 0) -> Tokens:
        first %= len(tokens)
        if offset:
            first = max(first, offset + self.config.segment_blocks)
        block_ids = chained_block_ids(tokens)[8 * offset :]
        arguments = {**self._arguments(change, first=first, offset=offset), "handle": change.handle}
        wanted, got = self._both(
            lambda: self.reference.insert(self.reference_namespaces[change.namespace], block_ids, **arguments),
            self.index.insert(self.namespaces[change.namespace], block_ids, **arguments),
        )
        if wanted is not None and got is not None:
            assert (got.applied, got.blocks_added) == (wanted.applied, wanted.blocks_added)
        self._known.add(tokens)
        return tokens

    def _insert_forks(self, base: Tokens, forks: list[tuple[int, Tokens]], change: Change) -> MultipleResults[Tokens]:
        branches = [self._branch(base, cut, suffix) or base for cut, suffix in forks]
        return multiple(*(self._insert(tokens, change, first=0) for tokens in branches))

    def _check_match(self, tokens: Tokens, question: Question) -> None:
        wave = self._check_answer(tokens, question, "wave")
        stepwise = self._check_answer(tokens, question, "stepwise")
        if self.config.routing_key_bits == DEFAULTS.routing_key_bits:
            assert wave.verified_blocks >= stepwise.verified_blocks

    def _check_answer(self, tokens: Tokens, question: Question, strategy: Strategy) -> Answer:
        block_ids = chained_block_ids(tokens)
        asked: dict[str, Any] = question._asdict()
        number = asked.pop("namespace")
        namespace, reference_namespace = self.namespaces[number], self.reference_namespaces[number]
        answer = Answer.of(self._run(self.index.match(namespace, block_ids, strategy=strategy, **asked)))
        wanted = self.reference.match(reference_namespace, block_ids, **asked)
        if self.config.retrieval_max is None:
            assert answer == wanted
        else:
            assert answer.verified_blocks <= wanted.verified_blocks
            assert answer == self.reference.match(reference_namespace, block_ids[: 8 * answer.verified_blocks], **asked)
        return answer


class ExactMachine(IndexMachine):
    """No cap, full keys: equal."""

    configs = scenarios.tiny_configs()


class CappedMachine(IndexMachine):
    """A cap on the candidates of a match: a prefix."""

    configs = scenarios.tiny_configs(retrieval_max=st.integers(1, 3))


class CollidingMachine(IndexMachine):
    """Everything collides: a prefix, never a wrong block."""

    configs = scenarios.tiny_configs(
        retrieval_max=st.none() | st.integers(1, 3),
        routing_key_bits=st.integers(1, 8),
        filter_field_bits=st.integers(1, 8),
    )


class FullSizeMachine(IndexMachine):
    """Segments of 64 blocks, sequences of hundreds."""

    configs = scenarios.full_size_configs()
    stretch = 7  # prime to 64: sequences part at every position of a segment


# Shrinking a failure takes longer than finding it, and so does a thorough search.
pytestmark = pytest.mark.timeout(1_800)

TestExact = ExactMachine.TestCase
TestCapped = CappedMachine.TestCase
TestColliding = CollidingMachine.TestCase
TestFullSize = FullSizeMachine.TestCase
