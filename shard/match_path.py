"""The read path: from a query's block IDs to who holds the longest prefix.

A match whose segments lie in the page cache runs from beginning to end without a trip through the event loop. One that
has to wait for the disk waits in one helper thread a wave.
"""

from __future__ import annotations

from collections.abc import Collection

from sarp_cluster import limits
from sarp_cluster.config import Strategy
from sarp_cluster.core.answering import MatchAnswer
from sarp_cluster.errors import BadRequestError, StorageError
from sarp_cluster.types import CandidateCounts, Tier, Worker
from shard.namespaces import IndexNamespace
from shard.requests import ALL_TIERS, DETAILS, check_block_ids, check_integer, tier_mask, worker_mask
from shard.state import IndexState


async def match(
    state: IndexState,
    namespace: IndexNamespace,
    block_ids: bytes,
    *,
    detail: str = "workers",
    tiers: Collection[Tier] | None = None,
    workers: Collection[Worker] | None = None,
    max_workers: int | None = None,
    strategy: Strategy | None = None,
) -> MatchAnswer:
    """See shard.index.Index.match."""
    block_ids = check_block_ids(block_ids)
    if detail not in DETAILS:
        raise BadRequestError(f"detail: {detail!r} is not one of {', '.join(DETAILS)}", field="detail")
    if max_workers is not None:
        check_integer(max_workers, "max_workers", limits.WORKERS_MAX, lowest=1)
    tiers_counted = ALL_TIERS if tiers is None else tier_mask(tiers)
    stepwise = (strategy or state.config.strategy) == "stepwise"

    search = state.search()
    search.load(block_ids, namespace.key, namespace.id, 0)
    pending = search.begin(stepwise)
    read_cached = state.store.read_cached
    while pending:
        if pending < 0:  # not long after a recovery: what routing needs is not in memory yet
            await state.loader.load_missed()
            pending = search.begin(stepwise)
            continue
        if read_cached(search.batch):
            await state.wait_for(search.batch)  # if cancelled here, the search is left to the thread that reads into it
        pending = search.resume()
    # Workers may have come or gone while the match waited: they are looked at when it answers.
    wanted = worker_mask(workers, state.workers, state.live_mask())
    answer = state.answering.answer(search, detail, tiers_counted, wanted, max_workers)
    state.idle_searches.append(search)
    return answer


def count_candidates(state: IndexState, namespace: IndexNamespace, block_ids: bytes) -> CandidateCounts:
    """See shard.index.Index.count_candidates."""
    search = state.search()
    search.load(check_block_ids(block_ids), namespace.key, namespace.id, 0)
    raw, filtered = search.count_candidates()
    state.idle_searches.append(search)
    if state.loader.missed:
        state.directory.take_missed()
        raise StorageError("the routing directory is not in memory yet: await Index.load_all() first")
    return CandidateCounts(raw, filtered)
