"""The exact oracle: bisection equals looking at each block, and both equal the definition on real traces."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from sarp_cluster.replay.oracle import PrefixOracle
from sarp_cluster.replay.token_trace import TokenTrace
from sarp_cluster.replay.traces import open_trace

SAMPLE = Path(__file__).parents[2] / "examples" / "sample"
ALL = sorted(SAMPLE.glob("*.*z*"))


def packed(*ids: int) -> bytes:
    return np.array(ids, "<u8").tobytes()


class NumberedPrefixes:
    """Gives each distinct prefix of blocks its own number: IDs without any hashing."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, bytes], int] = {}

    def __call__(self, tokens: bytes) -> bytes:
        prefix, ids = -1, []
        for at in range(0, len(tokens) - 63, 64):
            prefix = self.numbers.setdefault((prefix, tokens[at : at + 64]), len(self.numbers))
            ids.append(prefix)
        return packed(*ids)


@pytest.mark.parametrize("linear", [False, True])
def test_the_longest_inserted_prefix_is_found(linear: bool) -> None:
    oracle = PrefixOracle(linear=linear)
    assert oracle.matched_blocks(packed(1, 2, 3)) == 0
    assert oracle.insert(packed(1, 2, 3)) == 3
    assert oracle.insert(packed(1, 2, 4, 5)) == 2
    queries = (packed(1, 2, 4, 9), packed(1, 2, 3, 9), packed(9, 10), b"")
    assert [oracle.matched_blocks(query) for query in queries] == [3, 3, 0, 0]
    assert len(oracle) == 5


@pytest.mark.parametrize("linear", [False, True])
def test_every_64_bit_value_can_be_an_id(linear: bool) -> None:
    oracle = PrefixOracle(linear=linear)
    for sequence in (packed(2**64 - 1, 0, 2**63), packed(0), packed(*range(100))):
        oracle.insert(sequence)
    assert oracle.matched_blocks(packed(2**64 - 1, 0, 2**63, 5_000)) == 3
    assert oracle.matched_blocks(packed(*range(101))) == 100
    assert len(oracle) == 102


@pytest.mark.parametrize("seed", range(5))
def test_bisection_and_linear_search_equal_a_set_on_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [[rng.getrandbits(64) for _ in range(rng.randint(1, 300))]]
    for _ in range(200):
        base = rng.choice(sequences)
        own = [rng.getrandbits(64) for _ in range(rng.choice((0, 1, 5, 30, 400)))]
        sequences.append(base[: rng.randint(0, len(base))] + own)
    bisecting, linear, known = PrefixOracle(), PrefixOracle(linear=True), set[int]()
    for sequence in sequences:
        expected = next((i for i, block_id in enumerate(sequence) if block_id not in known), len(sequence))
        assert bisecting.matched_blocks(packed(*sequence)) == linear.matched_blocks(packed(*sequence)) == expected
        new = len(set(sequence) - known)
        assert bisecting.insert(packed(*sequence)) == linear.insert(packed(*sequence)) == new
        known.update(sequence)
    assert len(bisecting) == len(linear) == len(known)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_bisection_and_linear_search_agree_on_real_requests(path: Path) -> None:
    bisecting, linear = PrefixOracle(), PrefixOracle(linear=True)
    for request in open_trace(path).requests(NumberedPrefixes(), limit=1_500):
        assert bisecting.matched_blocks(request.context) == linear.matched_blocks(request.context)
        assert bisecting.insert(request.sequence) == linear.insert(request.sequence)


# As examples/sample/README.md says: found and requested (tokens, or blocks), and distinct blocks.
EXPECTED = {
    "mint_codeact": (0.9446, 113_298),
    "sharegpt_short": (0.8368, 33_104),
    "coding_agent_blocks": (0.9635, 697_525),
    "mooncake_conversation": (0.3256, 71_424),
}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_hit_rates_of_the_sample_are_those_it_documents(path: Path) -> None:
    trace, oracle = open_trace(path), PrefixOracle()
    found = requested = 0
    for request in trace.requests(NumberedPrefixes()):
        matched = oracle.matched_blocks(request.context)
        tokens = isinstance(trace, TokenTrace)
        found += matched * trace.block_tokens if tokens else matched
        requested += request.context_tokens if tokens else request.context_blocks
        oracle.insert(request.sequence)
    assert (round(found / requested, 4), len(oracle)) == EXPECTED[trace.name]


@pytest.mark.parametrize("name", ["coding_agent_blocks", "mooncake_conversation"])
def test_a_block_size_that_cuts_blocks_keeps_the_prefix_structure(name: str) -> None:
    trace = open_trace(SAMPLE / f"{name}.jsonl.gz")
    native, cut = PrefixOracle(), PrefixOracle()
    pieces = 4
    finer = open_trace(SAMPLE / f"{name}.jsonl.gz", block_tokens=trace.block_tokens // pieces)
    for coarse, fine in zip(
        trace.requests(NumberedPrefixes(), limit=800), finer.requests(NumberedPrefixes(), limit=800), strict=True
    ):
        matched = native.matched_blocks(coarse.context) * pieces
        assert cut.matched_blocks(fine.context) == min(matched, fine.context_blocks)
        native.insert(coarse.sequence)
        cut.insert(fine.sequence)
