"""The write path: what a worker newly holds, or no longer does.

Search, plan, put, commit. Between the end of the search and the commit nothing awaits; when the index changed while the
search waited for the disk, it starts again with the records it has.
"""

from __future__ import annotations

from sarp_cluster import limits
from sarp_cluster.core.insertion import Insertion
from sarp_cluster.errors import ConflictError, CorruptRecordError, StaleGenerationError
from sarp_cluster.types import InsertResult, Tier, Worker
from shard.namespaces import IndexNamespace
from shard.repair import repair
from shard.requests import BLOCK_ID_BYTES, check_integer, check_range, check_sequence, check_tier, check_worker
from shard.state import IndexState

EVERY_TIER = -1
NO_SEQ = -1
REPEATED = InsertResult(applied=False, blocks_added=0, segments_written=0, reads=0, waves=0)


async def insert(
    state: IndexState,
    namespace: IndexNamespace,
    block_ids: bytes,
    *,
    worker: Worker,
    generation: int,
    tier: Tier,
    first: int,
    offset: int,
    seq: int | None,
    handle: int | None,
    durable: bool,
    completes: bool,
) -> InsertResult:
    """See shard.index.Index.insert."""
    size = state.config.segment_blocks
    offset = check_integer(offset, "offset", limits.REQUEST_BLOCKS_MAX)
    block_ids = check_sequence(block_ids, offset)
    check_range(first, offset, offset + len(block_ids) // BLOCK_ID_BYTES, size)
    tier = check_tier(tier)
    if handle is not None:
        check_integer(handle, "handle", 2**64 - 1)
    check_change(state, worker, generation, seq)

    await state.store.room()
    insertion = state.insertion()
    insertion.load(block_ids, namespace.key, namespace.id, offset // size, first - offset)
    result = REPEATED
    planned = -1
    while planned < 0:
        await _search(state, insertion)
        if not check_change(state, worker, generation, seq):
            break
        insertion.check_prefix(offset == 0)
        planned = insertion.plan(state.workers.find_or_next(*worker), generation, tier, handle)
        if planned < 0:
            await state.loader.load_missed()
            continue
        _apply(state, insertion, worker, generation, seq if completes else None)
        search = insertion.search
        result = InsertResult(True, insertion.blocks_added, len(insertion.writes), search.reads, search.waves)
    state.idle_insertions.append(insertion)
    return result._replace(durable=True) if durable and await make_durable(state) else result


async def add_blocks(state: IndexState, namespace: IndexNamespace, block_ids: bytes, *, offset: int) -> int:
    """Enter blocks that nobody holds: what is left of a sequence when its last holder is gone. For `sarp load`.

    `block_ids` and `offset` as in `insert`. Returns how many blocks were not in the index before. Not durable before
    the store's next sync.
    """
    size = state.config.segment_blocks
    block_ids = check_sequence(block_ids, check_integer(offset, "offset", limits.REQUEST_BLOCKS_MAX))
    await state.store.room()
    insertion = state.insertion()
    # The held part begins behind the last block: it is empty, and no worker is entered.
    insertion.load(block_ids, namespace.key, namespace.id, offset // size, len(block_ids) // BLOCK_ID_BYTES)
    await _search(state, insertion)
    insertion.check_prefix(offset == 0)
    insertion.plan(0, 0, Tier.REMOTE, None)
    _put(state, insertion)
    added = insertion.blocks_added
    state.idle_insertions.append(insertion)
    return added


async def remove(
    state: IndexState,
    namespace: IndexNamespace,
    block_ids: bytes,
    *,
    worker: Worker,
    generation: int,
    tier: Tier | None,
    first: int,
    last: int | None,
    seq: int | None,
    durable: bool,
    completes: bool,
) -> int:
    """See shard.index.Index.remove."""
    size = state.config.segment_blocks
    block_ids = check_sequence(block_ids)
    end = len(block_ids) // BLOCK_ID_BYTES
    last = end if last is None else check_integer(last, "last", end, lowest=1)
    check_range(first, 0, last, size)
    tier_number = EVERY_TIER if tier is None else check_tier(tier)
    check_change(state, worker, generation, seq)

    await state.store.room()
    insertion = state.insertion()
    insertion.load(block_ids[: last * BLOCK_ID_BYTES], namespace.key, namespace.id, 0, first)
    changed = 0
    planned = -1
    while planned < 0:
        await _search(state, insertion)
        if not check_change(state, worker, generation, seq):
            break
        planned = insertion.plan_removal(state.workers.find_or_next(*worker), generation, tier_number)
        if planned < 0:
            await state.loader.load_missed()
            continue
        _apply(state, insertion, worker, generation, seq if completes else None)
        changed = planned
    state.idle_insertions.append(insertion)
    if durable:
        await make_durable(state)
    return changed


async def clear_worker(state: IndexState, worker: Worker, generation: int) -> None:
    """See shard.index.Index.clear_worker."""
    check_change(state, worker, generation, None)
    _enter_worker(state, worker, generation)
    await make_durable(state)


async def make_durable(state: IndexState) -> bool:
    """Wait until all that was put so far is durable: the changes acknowledged, and what they were based on.

    Also where nothing was put: a repetition must not be acknowledged before what it repeats.
    """
    if state.store.durable_lsn < state.store.lsn:
        await state.store.sync()
    return True


async def _search(state: IndexState, insertion: Insertion) -> None:
    """Search until nothing changed between the search's beginning and its end, and all that it met can be read.

    Raises CorruptRecordError where it meets a segment that cannot be read and not be repaired.
    """
    read_cached = state.store.read_cached
    for _ in range(limits.INSERT_ATTEMPTS_MAX):
        pending = insertion.begin()
        while pending:
            if pending < 0:
                await state.loader.load_missed()
                pending = insertion.begin()
                continue
            if read_cached(insertion.search.batch):
                await state.wait_for(insertion.search.batch)
            pending = insertion.resume()
        if insertion.damaged():
            await _repair(state, insertion)
        elif insertion.unchanged:
            return
    raise ConflictError(
        f"the index changed during each of {limits.INSERT_ATTEMPTS_MAX} attempts; nothing was applied, try again"
    )


async def _repair(state: IndexState, insertion: Insertion) -> None:
    """Repair some of what a search met and could not read, so that it may be done again.

    What it healed is written at once: it may be all that is left of a segment that has to be repaired.
    """
    damaged = insertion.damaged()
    healed = insertion.plan_healed()
    if healed < 0:
        await state.loader.load_missed()
    elif healed:
        _put(state, insertion)
    elif not any([await repair(state, slot) for slot in damaged]):
        raise CorruptRecordError(
            f"segment {damaged[0]} is damaged, others depend on it and nothing says what it held: nothing can be "
            f"inserted or removed under it until an insert goes on behind it"
        )


def _put(state: IndexState, insertion: Insertion) -> None:
    """Put what was planned, if it is anything, and enter it."""
    lost = insertion.lost_places()
    try:
        if len(insertion.writes):
            state.store.put(insertion.writes)
    except BaseException:
        insertion.abort()
        raise
    insertion.commit()
    state.healed += insertion.healed
    if lost:
        state.store.put_lost(*lost)


def _apply(state: IndexState, insertion: Insertion, worker: Worker, generation: int, seq: int | None) -> None:
    """Put what was planned, and enter it: no await in here. Until now nothing was changed, whatever was refused."""
    try:
        index = _enter_worker(state, worker, generation)
    except BaseException:
        insertion.abort()
        raise
    _put(state, insertion)
    if seq is not None:
        state.workers.set_seq(index, seq)
        state.store.put_worker_mark(index, state.workers.generation(index), seq)


def check_change(state: IndexState, worker: Worker, generation: int, seq: int | None) -> bool:
    """Is the change of this worker new? Raises StaleGenerationError when its cache was cleared since."""
    check_worker(worker)
    check_integer(generation, "generation", limits.GENERATION_MAX)
    if seq is not None:
        check_integer(seq, "seq", limits.SEQ_MAX)
    index = state.workers.find(*worker)
    if index is None:
        return True
    known = state.workers.generation(index)
    if generation < known:
        raise StaleGenerationError(
            f"generation: {generation} of worker {worker.instance_id!r} rank {worker.dp_rank} is over, "
            f"it is in {known}",
            field="generation",
        )
    return generation > known or seq is None or seq > state.workers.seq(index)


def _enter_worker(state: IndexState, worker: Worker, generation: int) -> int:
    """The worker's index. A new worker, or a newer generation, is recorded before anything of it.

    The store may refuse the record, when it is full: then nothing has changed.
    """
    index = state.workers.find(*worker)
    if index is None:
        index = state.workers.find_or_next(*worker)
        state.store.put_worker(index, worker.instance_id, worker.dp_rank)
        state.workers.add(*worker)
    if generation > state.workers.generation(index):
        state.store.put_worker_mark(index, generation, NO_SEQ)
        state.workers.set_generation(index, generation)
    return index
