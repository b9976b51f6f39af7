# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Answers: who holds how much of a verified prefix (design §6).

A block's locations are at its home: the segment that first stored it. For each window of the path the homes are the
segment itself from its fork on, its origin before that, and so on. Origins were read in the same wave; their block IDs are
compared with the query's like all others, and where one does not verify the answer ends.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, qsort, realloc
from libc.string cimport memmove

from sarp_cluster.core.matching cimport HOMES_MAX, Home, Search
from sarp_cluster.core.segment cimport LocationRun, SegmentColumns, blocks_mask
from sarp_cluster.core.worker_table cimport WorkerTable

from sarp_cluster import limits
from sarp_cluster.types import BlockLocation, Tier, Worker

cdef extern from *:
    """
    static inline int sarp_trailing_ones(unsigned long long x) { return ~x ? __builtin_ctzll(~x) : 64; }
    """
    int sarp_trailing_ones(unsigned long long x) noexcept nogil

cdef enum:
    TIERS = 4

cdef tuple TIER = tuple(Tier)


cdef class WorkerAnswer:
    """What one worker holds of a matched sequence: blocks of the longest prefix by tier, cumulative."""

    cdef readonly str instance_id
    cdef readonly int dp_rank
    cdef readonly int gpu
    cdef readonly int cpu
    cdef readonly int ssd
    cdef readonly int remote

    def __repr__(self):
        return (
            f"WorkerAnswer({self.instance_id!r}, {self.dp_rank}, gpu={self.gpu}, cpu={self.cpu}, ssd={self.ssd}, "
            f"remote={self.remote})"
        )


cdef class MatchAnswer:
    """The answer to a match; see types.MatchResult."""

    cdef readonly int matched_blocks
    cdef readonly int verified_blocks
    cdef readonly list workers
    cdef readonly list blocks
    cdef readonly bint truncated
    cdef readonly int reads
    cdef readonly int waves
    cdef readonly int retrieved
    cdef readonly int windows_routed


cdef int compare_holders(const void* a, const void* b) noexcept nogil:
    """Longest first, then by worker."""
    cdef const Holder* left = <const Holder*>a
    cdef const Holder* right = <const Holder*>b
    if left.reach[TIERS - 1] != right.reach[TIERS - 1]:
        return -1 if left.reach[TIERS - 1] > right.reach[TIERS - 1] else 1
    return -1 if left.rank < right.rank else 1


cdef class Answering:
    """Makes answers out of searches. Buffers are kept for the next one."""

    cdef WorkerTable workers
    cdef Holder* holder
    cdef int holders
    cdef int holder_capacity
    cdef int matched

    def __init__(self, WorkerTable workers):
        self.workers = workers

    def __dealloc__(self):
        free(self.holder)

    cdef int hold(self, int position, const LocationRun* run, uint64_t mask, bint enter) except -1 nogil:
        """Note that a worker holds blocks of the present window. Returns where it stands, to look from there next."""
        cdef int capacity
        cdef void* memory
        # Runs are sorted by worker, so are the holders: the place is at or after the last one.
        while position < self.holders and self.holder[position].worker < run.worker:
            position += 1
        if position == self.holders or self.holder[position].worker != run.worker:
            if not enter:
                return position
            if self.holders == self.holder_capacity:
                capacity = max(64, self.holder_capacity * 2)
                memory = realloc(self.holder, capacity * sizeof(Holder))
                if memory == NULL:
                    with gil:
                        raise MemoryError("answer")
                self.holder = <Holder*>memory
                self.holder_capacity = capacity
            memmove(&self.holder[position + 1], &self.holder[position], (self.holders - position) * sizeof(Holder))
            self.holder[position] = Holder(
                run.worker, self.workers.state[run.worker].rank, [0, 0, 0, 0], [0, 0, 0, 0]
            )
            self.holders += 1
        self.holder[position].mask[run.tier] |= mask
        return position

    cdef int gather(self, Search search, int tiers, const unsigned char* wanted) except -1 nogil:
        """Fill the holders and `matched` from a finished search."""
        cdef Home homes[HOMES_MAX]
        cdef int size = search.parameters.segment_blocks
        cdef int window = 0, start = 0
        cdef int count, i, t, position, matched, held
        cdef uint32_t r
        cdef uint64_t part, mask, available, cumulative
        cdef SegmentColumns* segment
        cdef LocationRun* run
        cdef Holder* holder
        self.holders = 0
        self.matched = 0
        while start < search.verified:
            matched = min(size, search.verified - start)
            count = search.homes(window, matched, homes)
            available = 0
            for i in range(count):
                segment = &search.batch.item[homes[i].item]
                part = blocks_mask(homes[i].begin, homes[i].end)
                position = 0
                for r in range(segment.runs_begin, segment.runs_begin + segment.runs_count):
                    run = &search.batch.run[r]
                    mask = run.mask & part
                    if (
                        mask == 0
                        or not self.workers.alive(run.worker, run.generation)
                        or not (tiers >> run.tier) & 1
                        or (wanted != NULL and not wanted[run.worker])
                    ):
                        continue
                    available |= mask
                    position = self.hold(position, run, mask, window == 0)
            for i in range(self.holders):
                holder = &self.holder[i]
                cumulative = 0
                for t in range(TIERS):
                    cumulative |= holder.mask[t]
                    holder.mask[t] = 0
                    if holder.reach[t] == start:
                        holder.reach[t] += sarp_trailing_ones(cumulative)
            held = sarp_trailing_ones(available)
            self.matched = start + held
            if held < size:
                break
            start += size
            window += 1
        return 0

    cdef list make_workers(self, object max_workers, MatchAnswer answer):
        cdef int i, kept
        cdef WorkerAnswer worker
        cdef Holder* holder
        kept = 0
        for i in range(self.holders):
            if self.holder[i].reach[TIERS - 1] > 0:
                if kept != i:
                    self.holder[kept] = self.holder[i]
                kept += 1
        if kept > 1:
            qsort(self.holder, kept, sizeof(Holder), compare_holders)
        if max_workers is not None and kept > max_workers:
            kept = max_workers
            answer.truncated = True
        made = []
        for i in range(kept):
            holder = &self.holder[i]
            worker = WorkerAnswer.__new__(WorkerAnswer)
            worker.instance_id, worker.dp_rank = <tuple>self.workers.names[holder.worker]
            worker.gpu = holder.reach[0]
            worker.cpu = holder.reach[1]
            worker.ssd = holder.reach[2]
            worker.remote = holder.reach[3]
            made.append(worker)
        return made

    cdef list make_blocks(self, Search search, int tiers, const unsigned char* wanted, MatchAnswer answer):
        """Locations of each matched block, in token order, sorted by worker and tier; cut where they are too many."""
        cdef Home homes[HOMES_MAX]
        cdef int size = search.parameters.segment_blocks
        cdef int window, i, block, end
        cdef uint32_t r
        cdef SegmentColumns* segment
        cdef LocationRun* run
        cdef Py_ssize_t left = limits.LOCATIONS_ANSWER_MAX
        made = []
        window = 0
        while window * size < self.matched:
            end = min(size, self.matched - window * size)
            for i in range(search.homes(window, end, homes)):
                segment = &search.batch.item[homes[i].item]
                for block in range(homes[i].begin, homes[i].end):
                    if left <= 0:
                        answer.truncated = True
                        return made
                    locations = []
                    for r in range(segment.runs_begin, segment.runs_begin + segment.runs_count):
                        run = &search.batch.run[r]
                        if (
                            (run.mask >> block) & 1
                            and self.workers.alive(run.worker, run.generation)
                            and (tiers >> run.tier) & 1
                            and (wanted == NULL or wanted[run.worker])
                        ):
                            locations.append(BlockLocation(
                                Worker(*self.workers.names[run.worker]), TIER[run.tier],
                                run.handle if run.has_handle else None,
                            ))
                    locations.sort(key=location_order)
                    made.append(locations)
                    left -= len(locations)
            window += 1
        return made

    def answer(self, Search search, str detail, int tiers, bytes wanted, max_workers):
        """The answer of a finished search.

        `tiers` is a mask of tiers that count, `wanted` a byte a worker (None: all), `detail` none, workers or blocks.
        """
        cdef MatchAnswer answer = MatchAnswer.__new__(MatchAnswer)
        cdef const unsigned char* filter_workers = NULL
        if wanted is not None:
            filter_workers = wanted
        with nogil:
            self.gather(search, tiers, filter_workers)
        answer.matched_blocks = self.matched
        answer.verified_blocks = search.verified
        answer.reads = search.reads
        answer.waves = search.waves
        answer.retrieved = search.retrieved
        answer.windows_routed = search.windows_routed
        answer.workers = [] if detail == "none" else self.make_workers(max_workers, answer)
        if detail == "blocks":
            answer.blocks = self.make_blocks(search, tiers, filter_workers, answer)
        return answer


def location_order(location):
    return location[0], location[1]
