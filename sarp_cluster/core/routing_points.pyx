# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Routing points: where segments are registered and where queries look (paper §4.2, §4.4).

Points of a segment, as offsets: the base points 0, I, 2I, … (I = S / R blocks), the midpoint of each interval, and the
last block S - 1, which belongs to the midpoint of the last interval. Each point but 0 lies *behind* another:

    base point -> next base point     when the list at the base point outgrows the pruning threshold (Algorithm 2)
    base point -> its midpoint        when that list outgrows τ
    last midpoint -> last block       when the list at that midpoint outgrows τ

Algorithm 2 skips a base point while the list at the preceding *retained* point is short, so the retained base points of a
sequence are always the first few: if one is skipped, all behind it are. Hence "retained" is kept once an entry, as the
state of the points behind it (routing_directory), and holds for every segment in its list: the invariant of design §4, that
a published entry lists every segment whose ID at its point is its key, follows by induction along the points.

When a list outgrows a threshold, the points behind it go from ABSENT to BUILDING: from then on whoever registers, extends
or removes a segment in the list does so behind it too, and a back-fill (refinement) is due for the segments already in the
list. Queries look behind an entry only once that is PUBLISHED; until then the entry itself is authoritative.

DEVIATION: a query goes from the first point deeper, only while points behind are published, instead of from the deepest
point back. By the invariant both end at the same entry, and this way probes one point in most windows.
"""

from libc.limits cimport INT_MAX
from libc.stdint cimport uint32_t, uint64_t

from sarp_cluster.core.candidate_filter cimport make_filter
from sarp_cluster.core.parameters cimport SarpParameters
from sarp_cluster.core.posting_tree cimport Posting
from sarp_cluster.core.segment cimport READ, SegmentBatch
from sarp_cluster.core.routing_directory cimport (
    ABSENT,
    BUILDING,
    LAST_BLOCK,
    MIDPOINT,
    NEXT,
    PUBLISHED,
    CandidateWalk,
    RoutingDirectory,
)

cdef enum:
    TOUCH_MARGIN = 64          # a list may change by a few postings between touching and registering


cdef class RoutingPoints:
    """Registers segments in a directory and routes queries through it. `due` collects the back-fills that became due:
    (key, point, kind), the arguments of refinement.Backfill."""

    def __init__(self, SarpParameters parameters, RoutingDirectory directory):
        self.parameters = parameters.c
        self.directory = directory
        self.due = []

    cdef int successor(self, int point, int kind) noexcept nogil:
        """The point of this kind behind `point`, or -1."""
        cdef int interval = self.parameters.interval
        cdef int last = self.parameters.segment_blocks - 1
        if kind == LAST_BLOCK:
            return last if point == last + 1 - interval + interval // 2 and point != last else -1
        if point % interval:
            return -1
        if kind == NEXT:
            return point + interval if point + interval <= last else -1
        return point + interval // 2

    # --- queries -----------------------------------------------------------------------------------------------------

    cdef int route(self, const uint64_t* ids, int count, uint64_t* key) noexcept nogil:
        """The deepest entry for a query window of `count` blocks: its point, and its key. -1: no entry at all."""
        cdef int point = 0
        cdef int state, state_behind, target
        cdef uint64_t key_behind
        key[0] = ids[0] & self.parameters.key_mask
        if not self.directory.probe(key[0], 0, &state):
            return -1
        while True:
            target = self.successor(point, NEXT)
            if 0 <= target < count and (not self.parameters.prune or (state >> NEXT) & 3 == PUBLISHED):
                key_behind = ids[target] & self.parameters.key_mask
                if self.directory.probe(key_behind, target, &state_behind):
                    point = target
                    key[0] = key_behind
                    state = state_behind
                    continue
            target = self.successor(point, MIDPOINT)
            if not (0 <= target < count and (state >> MIDPOINT) & 3 == PUBLISHED):
                target = self.successor(point, LAST_BLOCK)
                if not (0 <= target < count and (state >> LAST_BLOCK) & 3 == PUBLISHED):
                    return point
            key_behind = ids[target] & self.parameters.key_mask
            if not self.directory.probe(key_behind, target, &state_behind):
                return point
            point = target
            key[0] = key_behind
            state = state_behind

    cdef tuple count_candidates(self, const uint64_t* ids, int count):
        """(references in the list that routing chooses, those of them with the largest match potential)."""
        cdef CandidateWalk walk
        cdef uint64_t key, high, low
        cdef uint32_t slot
        cdef int equal
        cdef int best = -1
        cdef size_t ties = 0
        cdef int point = self.route(ids, count, &key)
        if point < 0:
            return 0, 0
        make_filter(&self.parameters, ids, count, point, &high, &low)
        self.directory.walk_begin(&walk, key, high, low)
        while True:
            equal = self.directory.walk_next(&walk, &slot)
            if equal < 0 or equal < best:
                return self.directory.count_up_to(key, <size_t>-1), ties
            best = equal
            ties += 1

    # --- registration ------------------------------------------------------------------------------------------------

    cdef bint registered(self, const uint64_t* ids, int point) noexcept nogil:
        """Is a segment registered at a point that it covers: are all the points before it no longer ABSENT?"""
        cdef int before, kind
        if point == 0:
            return True
        if point % self.parameters.interval == 0:
            before = point - self.parameters.interval
            kind = NEXT
        elif point % self.parameters.interval == self.parameters.interval // 2:
            before = point - self.parameters.interval // 2
            kind = MIDPOINT
        else:
            before = point + 1 - self.parameters.interval + self.parameters.interval // 2
            kind = LAST_BLOCK
        if not self.registered(ids, before):
            return False
        if kind == NEXT and not self.parameters.prune:
            return True
        return (self.directory.state(ids[before] & self.parameters.key_mask, before) >> kind) & 3 != ABSENT

    cdef int register(self, uint32_t slot, const uint64_t* ids, int count, int count_before) except -1:
        """Register a segment of `count` blocks, of which `count_before` (0: a new segment) are registered already.

        An extension re-sorts the reference: the fields of blocks that were not there are no longer zero, and a filter
        left as it was would underestimate. All of the old references go before the new ones come, so that one which two
        points share, where keys collide, is there in the end.
        """
        if count_before:
            self.withdraw_at(slot, ids, count, count_before, 0)
        return self.register_at(slot, ids, count, 0)

    cdef void touch(self, uint32_t slot, const uint64_t* ids, int count, int count_before) noexcept nogil:
        """Look wherever registering this segment may look, so that chunks which are not in memory are noted first.

        All points are looked at, whatever the state of those before them: that may change meanwhile.
        """
        cdef Posting posting
        cdef int point, state
        cdef int interval = self.parameters.interval
        cdef int last = self.parameters.segment_blocks - 1
        cdef size_t limit = TOUCH_MARGIN
        if self.parameters.refinement_threshold < INT_MAX:
            limit += self.parameters.refinement_threshold
        if self.parameters.prune and self.parameters.pruning_threshold > self.parameters.refinement_threshold:
            limit += self.parameters.pruning_threshold
        posting.slot = slot
        for point in range(count):
            if point % (interval // 2 if interval > 1 else 1) and point != last:
                continue
            posting.key = ids[point] & self.parameters.key_mask
            self.directory.probe(posting.key, point, &state)
            self.directory.count_up_to(posting.key, limit)
            make_filter(&self.parameters, ids, count, point, &posting.high, &posting.low)
            self.directory.touch(&posting)
            if point < count_before:
                make_filter(&self.parameters, ids, count_before, point, &posting.high, &posting.low)
                self.directory.touch(&posting)

    def unregistered(self, SegmentBatch batch):
        """Slots of segments that were read and are not registered at their first block.

        Void where entries were wanted that are not in memory: have them loaded and ask again.
        """
        cdef Posting posting
        cdef int item
        found = []
        for item in range(batch.count):
            if batch.item[item].state == READ:
                posting.key = batch.item[item].ids[0] & self.parameters.key_mask
                posting.slot = batch.item[item].slot
                make_filter(&self.parameters, batch.item[item].ids, batch.item[item].count, 0, &posting.high, &posting.low)
                if not self.directory.live_below(-1, &posting):
                    found.append(posting.slot)
        return found

    def register_batch(self, SegmentBatch batch):
        """Register segments that were read; for recovery. Returns how many could not be read and are left out."""
        cdef int item
        damaged = 0
        for item in range(batch.count):
            if batch.item[item].state == READ:
                self.register_at(batch.item[item].slot, batch.item[item].ids, batch.item[item].count, 0)
            else:
                damaged += 1
        return damaged

    cdef int withdraw_at(self, uint32_t slot, const uint64_t* ids, int count, int count_before, int point) except -1:
        """Take out the references, at a point and those behind it, whose filters an extension changes."""
        cdef Posting before
        cdef uint64_t high, low
        cdef int state, kind, target
        before.key = ids[point] & self.parameters.key_mask
        before.slot = slot
        make_filter(&self.parameters, ids, count_before, point, &before.high, &before.low)
        make_filter(&self.parameters, ids, count, point, &high, &low)
        if before.high != high or before.low != low:
            self.directory.discard(&before)
        state = self.directory.state(before.key, point)
        for kind in (NEXT, MIDPOINT, LAST_BLOCK):
            target = self.successor(point, kind)
            if 0 <= target < count_before and (
                (state >> kind) & 3 != ABSENT or (kind == NEXT and not self.parameters.prune)
            ):
                self.withdraw_at(slot, ids, count, count_before, target)
        return 0

    cdef int register_at(self, uint32_t slot, const uint64_t* ids, int count, int point) except -1:
        """Register a segment at a point it covers and at those behind it. Doing so again changes nothing."""
        cdef Posting posting
        posting.key = ids[point] & self.parameters.key_mask
        posting.slot = slot
        make_filter(&self.parameters, ids, count, point, &posting.high, &posting.low)
        self.directory.add(&posting)
        self.register_behind(slot, ids, count, point, NEXT, self.parameters.pruning_threshold)
        self.register_behind(slot, ids, count, point, MIDPOINT, self.parameters.refinement_threshold)
        self.register_behind(slot, ids, count, point, LAST_BLOCK, self.parameters.refinement_threshold)
        return 0

    cdef int register_behind(
        self, uint32_t slot, const uint64_t* ids, int count, int point, int kind, int threshold
    ) except -1:
        """Register at the point of this kind behind `point`, if there is one; make a back-fill due where the list outgrew
        its threshold."""
        cdef int target = self.successor(point, kind)
        cdef uint64_t key = ids[point] & self.parameters.key_mask
        cdef int state, behind
        if target < 0:
            return 0
        if kind == NEXT and not self.parameters.prune:
            behind = PUBLISHED
        else:
            state = self.directory.state(key, point)
            behind = (state >> kind) & 3
            if (behind == ABSENT and threshold < INT_MAX
                    and self.directory.count_up_to(key, <size_t>threshold + 1) > <size_t>threshold):
                behind = BUILDING
                self.directory.set_state(key, point, state | (BUILDING << kind))
                self.due.append((key, point, kind))
        if behind != ABSENT and target < count:
            self.register_at(slot, ids, count, target)
        return 0
