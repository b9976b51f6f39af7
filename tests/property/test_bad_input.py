"""Bad input is refused with an error that names the field and its limit, and leaves the index as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from sarp_cluster import limits
from sarp_cluster.config import IndexConfig
from sarp_cluster.errors import (
    BadRequestError,
    RequestError,
    StaleGenerationError,
    TooLargeError,
    UnknownNamespaceError,
    UnknownPrefixError,
)
from sarp_cluster.testing.reference_index import Answer, chained_block_ids
from sarp_cluster.types import Namespace, Worker
from shard.index import Index
from tests.property.scenarios import NAMESPACES, WORKERS

CONFIG: Final = IndexConfig(segment_blocks=8, base_points=2, retrieval_max=None)
S: Final = CONFIG.segment_blocks
TOKENS: Final = (0,) * 20
BLOCKS: Final = len(TOKENS)
IDS: Final = chained_block_ids(TOKENS)
GENERATION: Final = 3
SEQ: Final = 10
WORKER: Final = WORKERS[0]
TOO_LONG: Final = bytes(8 * (limits.REQUEST_BLOCKS_MAX + 1))


class Bad(NamedTuple):
    """A call that must be refused."""

    arguments: dict[str, Any]
    """Instead of, or beside, those of a good call."""
    error: type[RequestError]
    field: str
    limit: object = ""
    """What the message names, commas between digits aside."""


_IDS: Final = {
    "no whole number of blocks": Bad({"block_ids": IDS[:-1]}, BadRequestError, "block_ids", 8),
    "longer than the limit": Bad({"block_ids": TOO_LONG}, TooLargeError, "block_ids", limits.REQUEST_BLOCKS_MAX),
}
_WORKER: Final = {
    "nameless instance": Bad({"worker": Worker("")}, BadRequestError, "instance_id", limits.NAME_BYTES_MAX),
    "long instance name": Bad(
        {"worker": Worker("n" * (limits.NAME_BYTES_MAX + 1))}, BadRequestError, "instance_id", limits.NAME_BYTES_MAX
    ),
    "instance name of too many bytes": Bad(
        {"worker": Worker("é" * (limits.NAME_BYTES_MAX // 2 + 1))},
        BadRequestError,
        "instance_id",
        limits.NAME_BYTES_MAX,
    ),
    "negative rank": Bad({"worker": Worker("n", -1)}, BadRequestError, "dp_rank", limits.DP_RANK_MAX),
    "high rank": Bad({"worker": Worker("n", limits.DP_RANK_MAX + 1)}, BadRequestError, "dp_rank", limits.DP_RANK_MAX),
    "negative generation": Bad({"generation": -1}, BadRequestError, "generation", limits.GENERATION_MAX),
    "high generation": Bad(
        {"generation": limits.GENERATION_MAX + 1}, BadRequestError, "generation", limits.GENERATION_MAX
    ),
    "stale generation": Bad({"generation": GENERATION - 1}, StaleGenerationError, "generation", GENERATION),
}
_CHANGE: Final = {
    **_IDS,
    **_WORKER,
    "no block": Bad({"block_ids": b""}, BadRequestError, "block_ids"),
    "negative seq": Bad({"seq": -1}, BadRequestError, "seq", limits.SEQ_MAX),
    "high seq": Bad({"seq": limits.SEQ_MAX + 1}, BadRequestError, "seq", limits.SEQ_MAX),
    "negative first": Bad({"first": -1}, BadRequestError, "first"),
    "first at the end": Bad({"first": BLOCKS}, BadRequestError, "first", BLOCKS),
}
INSERTS: Final = {
    **_CHANGE,
    "first at the end, from an offset": Bad(
        {"block_ids": IDS[8 * S :], "offset": S, "first": BLOCKS}, BadRequestError, "first", BLOCKS
    ),
    "negative offset": Bad({"offset": -S, "first": S}, BadRequestError, "offset", S),
    "offset inside a segment": Bad({"block_ids": IDS[8:], "offset": 1, "first": S + 1}, BadRequestError, "offset", S),
    "less than a segment between offset and first": Bad(
        {"block_ids": IDS[8 * S :], "offset": S, "first": 2 * S - 1}, BadRequestError, "offset", S
    ),
    "unknown prefix": Bad(
        {
            "block_ids": chained_block_ids((1, *TOKENS))[8 * S :],
            "offset": S,
            "first": 2 * S,
            "generation": GENERATION + 1,
        },
        UnknownPrefixError,
        "offset",
    ),
    "known block at another position": Bad(
        {"block_ids": IDS, "offset": S, "first": 2 * S}, UnknownPrefixError, "offset"
    ),
    "negative handle": Bad({"handle": -1}, BadRequestError, "handle", 2**64 - 1),
    "handle of nine bytes": Bad({"handle": 2**64}, BadRequestError, "handle", 2**64 - 1),
}
REMOVALS: Final = {
    **_CHANGE,
    "last beyond the end": Bad({"last": BLOCKS + 1}, BadRequestError, "last", BLOCKS),
    "nothing between first and last": Bad({"first": 5, "last": 5}, BadRequestError, "first", 5),
}
MATCHES: Final = {
    **_IDS,
    "room for no worker": Bad({"max_workers": 0}, BadRequestError, "max_workers", 1),
    "negative max_workers": Bad({"max_workers": -1}, BadRequestError, "max_workers", 1),
    "unknown detail": Bad({"detail": "everything"}, BadRequestError, "detail", "blocks"),
}


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[Index]:
    """An index in which WORKER, in GENERATION, holds a sequence, and another a branch of it."""
    index = await Index.open(tmp_path / "index", CONFIG)
    for spec, seq in zip(NAMESPACES, (SEQ - 1, SEQ), strict=True):
        namespace = index.create_namespace(spec)
        await index.insert(namespace, IDS, worker=WORKER, generation=GENERATION, seq=seq)
        await index.insert(namespace, chained_block_ids((*TOKENS[:13], 1, 1)), worker=WORKERS[1])
    await index.drain_backfill()
    yield index
    await index.close()


@pytest.fixture
def namespace(index: Index) -> Namespace:
    """The first tenant's."""
    return index.create_namespace(NAMESPACES[0])


async def answers(index: Index) -> list[Answer]:
    """What the index answers about everything in it, in either namespace."""
    return [
        Answer.of(await index.match(index.create_namespace(spec), chained_block_ids(tokens), detail="blocks"))
        for spec in NAMESPACES
        for tokens in (TOKENS, (*TOKENS[:13], 1, 1), (1, *TOKENS))
    ]


async def refused(index: Index, method: str, bad: Bad, **good: object) -> None:
    """The call is refused as `bad` says, and nothing has changed: not the counts, not the answers, not the worker."""
    before, statistics = await answers(index), index.statistics()
    with pytest.raises(bad.error) as raised:
        await getattr(index, method)(**{**good, **bad.arguments})
    assert type(raised.value) is bad.error
    assert raised.value.field == bad.field
    assert bad.field in str(raised.value)
    assert str(bad.limit) in str(raised.value).replace(",", "")
    assert index.statistics() == statistics
    assert await answers(index) == before
    await index.validate()
    # Neither its generation nor its seq has moved.
    namespace = index.create_namespace(NAMESPACES[0])
    late = await index.insert(namespace, IDS, worker=WORKER, generation=GENERATION, seq=SEQ)
    assert not late.applied
    after = await index.insert(namespace, IDS, worker=WORKER, generation=GENERATION, seq=SEQ + 1)
    assert after.applied


@pytest.mark.parametrize("bad", INSERTS.values(), ids=INSERTS)
async def test_a_bad_insert_is_refused(index: Index, namespace: Namespace, bad: Bad) -> None:
    await refused(
        index, "insert", bad, namespace=namespace, block_ids=IDS, worker=WORKER, generation=GENERATION, seq=None
    )


@pytest.mark.parametrize("bad", REMOVALS.values(), ids=REMOVALS)
async def test_a_bad_removal_is_refused(index: Index, namespace: Namespace, bad: Bad) -> None:
    good: dict[str, object] = {"namespace": namespace, "block_ids": IDS, "worker": WORKER, "generation": GENERATION}
    await refused(index, "remove", bad, **good, tier=None, first=0, last=BLOCKS, seq=None)


@pytest.mark.parametrize("bad", MATCHES.values(), ids=MATCHES)
async def test_a_bad_match_is_refused(index: Index, namespace: Namespace, bad: Bad) -> None:
    await refused(index, "match", bad, namespace=namespace, block_ids=IDS)


@pytest.mark.parametrize("bad", _WORKER.values(), ids=_WORKER)
async def test_a_bad_clear_is_refused(index: Index, bad: Bad) -> None:
    await refused(index, "clear_worker", bad, worker=WORKER, generation=GENERATION + 1)


class Invented:
    """A namespace that no index made."""

    spec = NAMESPACES[0]

    def block_ids(self, token_ids: bytes) -> bytes:
        """As the opaque profile."""
        raise BadRequestError("token_ids: only the caller knows the IDs of this namespace", field="token_ids")


@pytest.mark.parametrize("method", ["match", "insert", "remove"])
@pytest.mark.parametrize("origin", ["another index", "nowhere"])
async def test_a_namespace_must_be_of_this_index(index: Index, tmp_path: Path, method: str, origin: str) -> None:
    other = await Index.open(tmp_path / "other", CONFIG)
    try:
        namespace: Namespace = other.create_namespace(NAMESPACES[0]) if origin == "another index" else Invented()
        good: dict[str, object] = {} if method == "match" else {"worker": WORKER, "generation": GENERATION, "first": 0}
        if method == "remove":
            good |= {"tier": None, "last": BLOCKS}
        bad = Bad({"namespace": namespace}, UnknownNamespaceError, "namespace")
        await refused(index, method, bad, block_ids=IDS, **good)
    finally:
        await other.close()


async def test_an_empty_query_matches_nothing(index: Index, namespace: Namespace) -> None:
    assert Answer.of(await index.match(namespace, b"", detail="blocks")) == Answer(0, 0, [], [], False)


async def test_the_longest_request_is_accepted(index: Index, namespace: Namespace) -> None:
    longest = TOO_LONG[8:]
    assert (await index.match(namespace, longest)).matched_blocks == 0


async def test_extreme_numbers_are_accepted(index: Index, namespace: Namespace) -> None:
    worker = Worker("n" * limits.NAME_BYTES_MAX, limits.DP_RANK_MAX)
    arguments: dict[str, Any] = {"worker": worker, "generation": limits.GENERATION_MAX, "handle": 2**64 - 1}
    assert (await index.insert(namespace, IDS, seq=limits.SEQ_MAX, **arguments)).applied
    assert not (await index.insert(namespace, IDS, seq=0, **arguments)).applied
    result = await index.match(namespace, IDS, detail="blocks", workers=[worker])
    assert Answer.of(result).blocks == [[(worker, 0, 2**64 - 1)]] * BLOCKS
