"""Any operations in any order, and segments that rot in between: nothing is answered that the oracle does not know.

What rotted is healed by inserting everything again: then the same blocks are there as before, each once. Who held them
may be lost, so from then on answers are parts of the oracle's. Whoever inserts is found with all of it, and not any
more once it is removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sarp_cluster import limits
from sarp_cluster.config import Strategy
from sarp_cluster.errors import CorruptRecordError
from sarp_cluster.storage.store_directory import log_file_name
from sarp_cluster.testing.reference_index import Answer, chained_block_ids
from sarp_cluster.types import Worker
from shard.index import Index
from tests.property import scenarios
from tests.property.scenarios import Question, Tokens
from tests.property.test_index_state_machine import IndexMachine

FIRST_SLOT = 4096
HEALER = Worker("healer")


def spoil(directory: Path, places: list[int]) -> None:
    """Flip a bit of each of these records."""
    for place in places:
        path = directory / log_file_name(place >> 48)
        data = bytearray(path.read_bytes())
        data[((place & 0xFFFFFFFF) << 3) + 40] ^= 1
        path.write_bytes(data)


class DamagedMachine(IndexMachine):
    """With damage."""

    configs = scenarios.tiny_configs()
    exact: ClassVar[bool] = True
    """Is everything found that is there?"""
    lost = False
    """Has anything been damaged?"""

    @rule(chosen=st.sets(st.integers(0, 1_000), min_size=1, max_size=6), deltas=st.booleans())
    def damage(self, chosen: set[int], deltas: bool) -> None:
        """Some segments rot; then everything is inserted again, and after that removed."""
        index = self.index
        self._run(index.load_all())
        self._run(index.store.sync())
        table = index.state.table
        rows = [row for slot in range(FIRST_SLOT, table.slots_end) if (row := table.describe(slot)) is not None]
        victims = {number % len(rows) for number in chosen} if rows else set()
        if not victims:
            return
        self.lost = True
        spoil(Path(self._directory.name), [(deltas and rows[n]["delta"]) or rows[n]["image"] for n in victims])
        waiting = [
            (number, tokens) for number in range(len(self.namespaces)) for tokens in sorted(self._known) if tokens
        ]
        while waiting:
            refused = [one for one in waiting if not self._run(self._heals(index, *one))]
            assert len(refused) < len(waiting), "nothing helps"
            waiting = refused
        self._run(self._scrub(index))
        for number in range(len(self.namespaces)):
            for tokens in sorted(self._known):
                self._check_healer(number, tokens, len(tokens))
        for number in range(len(self.namespaces)):
            for tokens in filter(None, sorted(self._known)):
                block_ids = chained_block_ids(tokens)
                self._run(index.remove(self.namespaces[number], block_ids, worker=HEALER))
                # The blocks stay, held by nobody, in the oracle as well.
                self.reference.insert(self.reference_namespaces[number], block_ids, worker=HEALER)
                self.reference.remove(self.reference_namespaces[number], block_ids, worker=HEALER)
        for number in range(len(self.namespaces)):
            for tokens in sorted(self._known):
                self._check_healer(number, tokens, 0)

    async def _heals(self, index: Index, number: int, tokens: Tokens) -> bool:
        try:
            await index.insert(self.namespaces[number], chained_block_ids(tokens), worker=HEALER)
        except CorruptRecordError:
            return False
        return True

    async def _scrub(self, index: Index) -> None:
        """What no sequence leads to is repaired, too."""
        await index.background.scrub.step(0.0)
        while index.background.scrub.wait_s(0.0) != limits.SCRUB_PAUSE_S:
            await index.background.scrub.step(0.0)

    def _answers(self) -> list[Answer]:
        return [
            Answer.of(self._run(self.index.match(namespace, chained_block_ids(tokens), detail="blocks")))
            for namespace in self.namespaces
            for tokens in sorted(self._known)
        ]

    @rule()
    def dump_and_load(self) -> None:
        """What was healed hangs together in other ways than what is inserted anew: its dump may have another order."""
        answers = self._answers()
        super().dump_and_load()
        assert self._answers() == answers or not self.exact

    def _check_dumped_again(self, lines: list[bytes]) -> None:
        if not self.lost:
            super()._check_dumped_again(lines)

    def _check_healer(self, number: int, tokens: Tokens, held: int) -> None:
        answer = self._run(
            self.index.match(self.namespaces[number], chained_block_ids(tokens), workers=frozenset({HEALER}))
        )
        assert answer.matched_blocks == held or (answer.matched_blocks < held and not self.exact)

    def _check_answer(self, tokens: Tokens, question: Question, strategy: Strategy) -> Answer:
        if not self.lost:
            return super()._check_answer(tokens, question, strategy)
        asked: dict[str, Any] = question._asdict() | {"detail": "blocks", "max_workers": None}
        number = asked.pop("namespace")
        block_ids = chained_block_ids(tokens)
        answer = Answer.of(self._run(self.index.match(self.namespaces[number], block_ids, strategy=strategy, **asked)))
        wanted = self.reference.match(self.reference_namespaces[number], block_ids, **asked)
        assert answer.verified_blocks <= wanted.verified_blocks
        assert answer.verified_blocks == wanted.verified_blocks or not self.exact
        assert answer.matched_blocks <= wanted.matched_blocks
        for got, known in zip(answer.blocks or [], wanted.blocks or [], strict=False):
            assert set(got) <= set(known)
        return answer


class DamagedCollidingMachine(DamagedMachine):
    """Everything collides, so that stale postings stand in the lists of others."""

    configs = scenarios.tiny_configs(routing_key_bits=st.integers(1, 8), filter_field_bits=st.integers(1, 8))
    exact = False


pytestmark = pytest.mark.timeout(1_800)

TestDamaged = DamagedMachine.TestCase
TestDamagedColliding = DamagedCollidingMachine.TestCase
# After each damage everything is inserted and removed again: that takes its time.
TestDamaged.settings = TestDamagedColliding.settings = settings(max_examples=settings().max_examples // 3)
