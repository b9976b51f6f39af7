"""The hot benchmark: its workloads have the shape they claim, and a wrong answer ends a run."""

from __future__ import annotations

import asyncio
from itertools import islice
from types import SimpleNamespace
from typing import cast

import pytest

from bench.baselines import Match
from bench.baselines.python_dict import DictIndex
from bench.hot_match import AGENT, CHAT, AnyContestant, IndexContestant, Shape, measure, synthetic
from sarp_cluster.types import MatchResult, Namespace, PrefixIndex, Worker


class AwaitedDict:
    """A `PrefixIndex` in the two methods that the benchmark calls."""

    def __init__(self) -> None:
        self._index = DictIndex()

    async def match(self, namespace: object, ids: bytes) -> MatchResult:
        matched, workers = self._index.match(ids)
        rows = [SimpleNamespace(instance_id=f"{worker:04}", gpu=blocks) for worker, blocks in workers]
        return cast(MatchResult, SimpleNamespace(matched_blocks=matched, workers=rows))

    async def insert(self, namespace: object, ids: bytes, *, worker: Worker, first: int, durable: bool) -> None:
        await asyncio.sleep(0)
        self._index.insert(ids, int(worker.instance_id), first)


class Forgetful(DictIndex):
    """Answers each match as if the context had one block, as a cap on reads may."""

    def match(self, ids: bytes) -> Match:
        return super().match(ids[:8])


class Boastful(DictIndex):
    """Has a block that nobody gave it."""

    def match(self, ids: bytes) -> Match:
        matched, workers = super().match(ids)
        return Match(matched + 1, workers)


def measured(*contestants: AnyContestant, requests: int) -> list[tuple[int, int]]:
    times = asyncio.run(measure(contestants, islice(synthetic(CHAT), requests)))
    return [(len(one.match), len(one.insert)) for one in times]


@pytest.mark.parametrize("shape", [CHAT, AGENT])
def test_contexts_stay_in_their_range_and_grow(shape: Shape) -> None:
    requests = list(islice(synthetic(shape), 1500))
    shortest, longest = shape.context_blocks
    for ids, _, _, first in requests:
        assert len(ids) % 8 == 0
        assert shortest <= len(ids) // 8 <= longest
        assert first <= len(ids) // 8
    assert requests == list(islice(synthetic(shape), 1500))
    firsts = {request.ids[:8] for request in requests}
    assert len(firsts) <= shape.system_prompts


def test_a_worker_held_what_the_request_says() -> None:
    index = DictIndex()
    for ids, sequence, worker, first in islice(synthetic(CHAT), 2000):
        assert dict(index.match(ids).workers).get(worker, 0) == first
        index.insert(sequence, worker, first)


def test_each_contestant_is_timed_once_a_request() -> None:
    awaited = IndexContestant("awaited", cast(PrefixIndex, AwaitedDict()), cast(Namespace, None))
    assert measured(DictIndex(), awaited, requests=250) == [(250, 250)] * 2


def test_a_wrong_answer_ends_the_run() -> None:
    with pytest.raises(SystemExit, match=r"request \d+: Python dict answers"):
        measured(DictIndex(), Boastful(), requests=250)


def test_a_shorter_answer_does_not_end_the_run() -> None:
    assert measured(DictIndex(), Forgetful(), requests=250) == [(250, 250)] * 2
