# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Matching: from the block IDs of a query to the verified segments of its longest prefix (paper §4.1, §4.3; design §4).

A Search does no I/O. It lists in `batch` the segments it wants read, the caller reads them, `advance` goes on; each round is
a *wave*. Two strategies walk the same state:

* **wave** (default): the deepest window whose first key is present is found by binary search, since a child is never in the
  index without its parent. Its candidates, all their ancestors (by parent references) and the origins that hold the
  locations of copied prefixes are then read in one wave.
* **stepwise** (the paper's): window by window from the first.

In a window, candidates are retrieved in the order of their match potential until a verified match reaches the largest
bound left or MaxRetrieval is spent. Every block ID of every window, origins included, is compared with the query's; a
segment that does not verify, is damaged or belongs to another namespace counts as a wrong candidate. So filters, routing
entries and parent references may all lie: the answer gets shorter, never wrong.

What a wave does about lies: a top window without any match is given up for the one before it; an ancestor that differs
sends the search through the windows stepwise from there on.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from sarp_cluster.core.block_id cimport NamespaceKey
from sarp_cluster.core.candidate_filter cimport make_filter, match_bound
from sarp_cluster.core.parameters cimport SarpParameters
from sarp_cluster.core.query cimport Query
from sarp_cluster.core.segment cimport DAMAGED, IMAGE as WRITE_IMAGE, READ, TO_READ, SegmentColumns
from sarp_cluster.core.segment_table cimport SegmentRow

cdef enum:
    CANDIDATES = 0             # phases: waiting for candidates
    CHAIN = 1                  # waiting for ancestors or origins of the chosen one


cdef class Search(Query):
    """One query's way through the index. Objects are reused: `reset` starts anew and keeps the buffers."""

    def __init__(self, SarpParameters parameters, RoutingDirectory directory, RoutingPoints points, SegmentTable table):
        self.parameters = parameters.c
        self.directory = directory
        self.points = points
        self.table = table
        self.batch = SegmentBatch()
        self.previous = SegmentBatch()

    def __dealloc__(self):
        free(self.path)

    cdef int reset(self, int homes_from) except -1:
        """Forget the walk, keep the query and the records that were read."""
        self.previous, self.batch = self.batch, self.previous
        self.batch.clear()
        self.previous_hint = 0
        self.homes_from = homes_from
        self.verified = 0
        self.reads = 0
        self.waves = 0
        self.retrieved = 0
        self.windows_routed = 0
        self.stepwise = False
        self.directory_version = self.directory.version
        self.table_version = self.table.version
        return 0

    cdef bint missed(self) noexcept nogil:
        """Did this step want rows or entries that are not in memory? Then it is void."""
        return self.directory.missing.count != 0 or self.table.missed_count != 0

    cdef bint unchanged(self) noexcept nogil:
        """Is the index as it was when the search began?"""
        return self.directory_version == self.directory.version and self.table_version == self.table.version

    cdef int start(self, int top, int low) except -1:
        """Search windows low..top together. Returns how many segments are to be read."""
        cdef int pending = self.open_window(top, low)
        if pending:
            self.waves += 1
            return pending
        return self.advance()

    # --- candidates --------------------------------------------------------------------------------------------------

    cdef int open_window(self, int top, int low) except -1:
        """Route the query's window `top` and ask for its first candidates; 0 if there is none."""
        cdef int pending
        self.top = top
        self.low = low
        self.phase = CANDIDATES
        self.window_items = self.batch.count
        self.window_items_end = self.batch.count
        self.window_retrieved = 0
        self.best_item = -1
        self.path[top] = -1
        pending = self.open_entry(self.window_blocks(top))
        self.windows_routed += self.walk_point >= 0
        return pending

    cdef int open_entry(self, int blocks) except -1:
        """Route the first `blocks` blocks of the window `top` and ask for the entry's first candidates."""
        cdef uint64_t* window = self.ids + <Py_ssize_t>self.top * self.parameters.segment_blocks
        cdef uint64_t key, high, filter_low
        self.walk_point = self.points.route(window, blocks, &key)
        self.candidates = 0
        self.candidate_next = 0
        self.walk_open = self.parameters.segment_blocks
        if self.walk_point < 0:
            return 0
        make_filter(&self.parameters, window, self.window_blocks(self.top), self.walk_point, &high, &filter_low)
        self.directory.walk_begin(&self.walk, key, high, filter_low)
        self.walk_version = self.directory.version
        return self.request()

    cdef int rank(self) except -1:
        """Take the next candidates from the walk, best first. Returns how many there are."""
        cdef int blocks = self.window_blocks(self.top)
        cdef int equal, end, i, j
        cdef uint32_t slot
        cdef SegmentRow* row
        cdef Candidate candidate
        cdef bint seen
        self.candidates = 0
        self.candidate_next = 0
        if self.walk_point < 0:
            return 0
        if self.walk_version != self.directory.version:
            # The index changed while the last wave was read: walk again, skipping what was retrieved.
            self.directory.walk_begin(&self.walk, self.walk.key, self.walk.high, self.walk.low)
            self.walk_version = self.directory.version
        while self.candidates < CANDIDATES_MAX:
            equal = self.directory.walk_next(&self.walk, &slot)
            if equal < 0:
                self.walk_open = 0
                break
            seen = False
            for i in range(self.window_items, self.window_items_end):
                seen = seen or self.batch.item[i].slot == slot
            if seen:
                continue
            row = self.table.row(slot)
            if row.namespace_id != self.namespace_id or row.window != self.base_window + self.top or row.count == 0:
                continue  # a colliding key, or what is left of a segment that is gone; what is foreign is not even read
            end = blocks if blocks < row.count else row.count
            candidate.slot = slot
            candidate.bound = match_bound(&self.parameters, equal, self.walk_point, end)
            candidate.open = (
                equal == self.parameters.fields
                and self.walk_point + self.parameters.reach < end
            )
            # Files and offsets grow, so the place of the newest record orders registrations.
            candidate.registered = (row.image >> 48 << 32) | (row.image & 0xFFFFFFFFu)
            self.walk_open = match_bound(&self.parameters, equal, self.walk_point, blocks)
            j = self.candidates
            while j > 0 and (
                self.candidate[j - 1].bound < candidate.bound
                or (
                    self.candidate[j - 1].bound == candidate.bound
                    and self.candidate[j - 1].registered < candidate.registered
                )
            ):
                self.candidate[j] = self.candidate[j - 1]
                j -= 1
            self.candidate[j] = candidate
            self.candidates += 1
        return self.candidates

    cdef int request(self) except -1:
        """Ask for the next candidates worth retrieving. Returns how many segments are to be read; 0: enough is known."""
        cdef int best = 0 if self.best_item < 0 else self.batch.item[self.best_item].matched
        cdef int count_before = self.batch.count
        cdef int bound = 0
        cdef int item
        cdef bint open_tie = False
        while self.window_retrieved < self.retrieval_max:
            if self.candidate_next == self.candidates:
                if self.candidates and self.walk_open <= best:
                    break
                if bound or self.rank() == 0:
                    break
            if bound == 0:
                if self.candidate[self.candidate_next].bound <= best:
                    # So are those ranked with it. Others that the walk can still yield may be longer.
                    self.candidate_next = self.candidates
                    continue
                bound = self.candidate[self.candidate_next].bound
                open_tie = self.candidate[self.candidate_next].open
            elif not (open_tie and self.candidate[self.candidate_next].open):
                break
            item = self.add(self.candidate[self.candidate_next].slot)
            self.candidate_next += 1
            self.window_retrieved += 1
            self.retrieved += 1
        if self.batch.count == count_before:
            return 0
        self.window_items_end = self.batch.count
        if count_before == self.window_items:
            # The first candidate is nearly always the right one: its ancestors and origins go into the same wave.
            self.add_chain(self.window_items)
            self.add_origins(self.window_items)
        return self.batch.count - count_before

    # --- what is to be read --------------------------------------------------------------------------------------------

    cdef int add(self, uint32_t slot) except -1:
        """List a segment for reading. Returns its item."""
        cdef int item = self.batch.append()
        cdef int i, tried
        cdef SegmentColumns* wanted = &self.batch.item[item]
        cdef SegmentColumns* known
        cdef uint32_t runs
        self.table.load(slot, wanted)
        self.reads += 1
        # An earlier attempt may have read the same records; they never change where they stand.
        for tried in range(self.previous.count):
            i = (self.previous_hint + tried) % self.previous.count
            known = &self.previous.item[i]
            if known.slot == slot:
                self.previous_hint = i + 1
                if (known.state == READ and known.tag == wanted.tag and known.image == wanted.image
                        and known.delta == wanted.delta):
                    runs = known.runs_count
                    self.batch.reserve_runs(runs)
                    for i in range(runs):
                        self.batch.run[self.batch.run_count + i] = self.previous.run[known.runs_begin + i]
                    wanted[0] = known[0]
                    wanted.origin_item = -1
                    wanted.matched = 0
                    wanted.runs_begin = self.batch.run_count
                    self.batch.run_count += runs
                break
        return item

    cdef int add_origins(self, int item) except -1:
        """List the origins of a segment, one behind the other. Returns how many were not listed before."""
        cdef int window = self.batch.item[item].window - self.base_window
        cdef int added = 0
        cdef int i, origin
        cdef uint32_t slot
        if window < self.homes_from:
            return 0
        while self.batch.item[item].origin and self.batch.item[item].state != DAMAGED:
            slot = self.batch.item[item].origin
            origin = self.batch.item[item].origin_item
            if origin < 0:
                if window == self.top:
                    for i in range(self.window_items, self.batch.count):
                        if self.batch.item[i].slot == slot:
                            origin = i
                            break
                if origin < 0:
                    origin = self.add(slot)
                    added += 1
                self.batch.item[item].origin_item = origin
            item = origin
        return added

    cdef int add_chain(self, int item) except -1:
        """List the ancestors of a segment of window `top` down to `low`. Returns how many were not listed before."""
        cdef uint32_t slot = self.batch.item[item].parent
        cdef int window = self.top - 1
        cdef int count_before = self.batch.count
        cdef int ancestor
        while window >= self.low and slot:
            ancestor = self.add(slot)
            self.path[window] = ancestor
            self.add_origins(ancestor)
            slot = self.table.row(slot).parent
            window -= 1
        while window >= self.low:
            self.path[window] = -1  # a false candidate, of a sequence that begins later
            window -= 1
        return self.batch.count - count_before

    # --- what was read -------------------------------------------------------------------------------------------------

    cdef int verify(self, int item, int window) noexcept nogil:
        """Leading blocks of the window that a segment, as it was read, has in common with the query."""
        cdef SegmentColumns* segment = &self.batch.item[item]
        cdef uint64_t* wanted = self.ids + <Py_ssize_t>window * self.parameters.segment_blocks
        cdef int end = self.window_blocks(window)
        cdef int matched = 0
        if (segment.state != READ or segment.namespace_id != self.namespace_id
                or segment.window != self.base_window + window):
            return 0
        if segment.count < end:
            end = segment.count
        if memcmp(segment.ids, wanted, end * sizeof(uint64_t)) == 0:
            return end
        while segment.ids[matched] == wanted[matched]:
            matched += 1
        return matched

    cdef int advance(self) except -1:
        """Go on with what was read. Returns how many segments are to be read next; 0: the search is over."""
        cdef int pending
        while True:
            pending = self.choose() if self.phase == CANDIDATES else 0
            if pending == 0:
                pending = self.conclude()
            if pending > 0:
                self.waves += 1
                return pending
            if pending == 0:
                return 0
            pending = self.open_window(self.top, self.low)  # conclude moved on to another window
            if pending:
                self.waves += 1
                return pending

    cdef int choose(self) except -1:
        """Verify the candidates that arrived; ask for more, or for what the best one still lacks."""
        cdef int item, matched, pending
        for item in range(self.window_items, self.window_items_end):
            if self.batch.item[item].slot == 0 or self.batch.item[item].matched:
                continue
            matched = self.verify(item, self.top)
            self.batch.item[item].matched = matched
            if matched and (self.best_item < 0 or matched > self.batch.item[self.best_item].matched):
                self.best_item = item
        pending = self.request()
        while pending == 0 and self.walk_point > 0 and self.window_retrieved < self.retrieval_max and (
            self.best_item < 0 or self.batch.item[self.best_item].matched <= self.walk_point
        ):
            # Nobody matches through the entry's point: its key only collides with the query's. The one before, then.
            pending = self.open_entry(self.walk_point)
        if pending:
            return pending
        self.phase = CHAIN
        if self.best_item < 0:
            return 0
        if self.top > self.low and (
            self.path[self.top - 1] < 0
            or self.batch.item[self.path[self.top - 1]].slot != self.batch.item[self.best_item].parent
        ):
            pending += self.add_chain(self.best_item)
        return pending + self.add_origins(self.best_item)

    cdef int conclude(self) except -1:
        """Join what is verified. Returns 0 when the search is over, -2 when it goes on in window `top`."""
        cdef int size = self.parameters.segment_blocks
        cdef int window
        if self.best_item < 0:
            self.verified = self.low * size
            if self.top > self.low:
                self.top -= 1
                return -2
            return 0
        self.path[self.top] = self.best_item
        if self.healing:
            self.heal_ancestors()
        for window in range(self.low, self.top):
            if self.path[window] < 0 or self.verify(self.path[window], window) < size:
                self.verified = window * size
                self.stepwise = True
                self.top = window
                self.low = window
                return -2
            self.batch.item[self.path[window]].matched = size
        self.verified = self.top * size + self.batch.item[self.best_item].matched
        if self.stepwise and self.batch.item[self.best_item].matched == size and self.top + 1 < self.windows:
            self.top += 1
            self.low = self.top
            return -2
        return 0

    cdef void heal_ancestors(self) noexcept nogil:
        """Restore ancestors whose records do not verify: what they held is known, who held it is lost.

        Block IDs are chained, so a verified block behind an ancestor says that all of the ancestor's are the query's. It
        is written anew, under its own slot, by the insert that met it: nothing is stored twice.
        """
        cdef int size = self.parameters.segment_blocks
        cdef int window
        cdef SegmentColumns* segment
        for window in range(self.top - 1, self.low - 1, -1):
            if self.path[window] < 0 or self.path[window + 1] < 0:
                continue
            segment = &self.batch.item[self.path[window]]
            if (
                segment.state == DAMAGED
                and segment.count == size
                and segment.namespace_id == self.namespace_id
                and segment.window == self.base_window + window
                and self.batch.item[self.path[window + 1]].parent == segment.slot
                and self.verify(self.path[window + 1], window + 1) > 0
            ):
                memcpy(segment.ids, self.ids + <Py_ssize_t>window * size, size * sizeof(uint64_t))
                segment.image_count = 0
                segment.runs_begin = self.batch.run_count
                segment.runs_count = 0
                segment.state = READ
                segment.write = WRITE_IMAGE

    cdef int homes(self, int window, int matched, Home* homes) noexcept nogil:
        """Homes of the first `matched` blocks of a verified window, in token order, as many as verify.

        A home is the segment itself from its fork on, its origin before that, and so on (segment_table S2).
        """
        cdef int item = self.path[window]
        cdef int end = matched
        cdef int count = 0
        cdef int i, known
        cdef Home swap
        cdef SegmentColumns* segment
        while end > 0 and item >= 0 and count < HOMES_MAX:
            segment = &self.batch.item[item]
            if segment.fork < end:
                homes[count] = Home(item, segment.fork, end)
                count += 1
                end = segment.fork
            item = segment.origin_item if segment.origin else -1
        for i in range(count // 2):
            swap = homes[i]
            homes[i] = homes[count - 1 - i]
            homes[count - 1 - i] = swap
        known = 0
        for i in range(count):
            if homes[i].begin != known or self.verify(homes[i].item, window) < homes[i].end:
                return i
            known = homes[i].end
        return count

    # --- entry points for the shell ------------------------------------------------------------------------------------

    cpdef load(self, bytes wire, NamespaceKey key, uint32_t namespace_id, int base_window):
        """Take the query: wire IDs as bytes, and the window of the first."""
        cdef void* memory
        self.take(wire, key, namespace_id, base_window)
        if self.windows > self.path_capacity:
            memory = realloc(self.path, self.windows * sizeof(int))
            if memory == NULL:
                raise MemoryError("search")
            self.path = <int*>memory
            self.path_capacity = self.windows
        self.previous.clear()
        self.batch.clear()

    def begin(self, bint stepwise, int homes_from=0, retrieval_max=None):
        """Search for the longest prefix. Returns how many segments of `batch` are to be read; 0: done.

        -1: rows or entries that are not in memory were wanted (RoutingDirectory.missed, SegmentTable.missed_pages).
        Have them loaded and begin again.
        """
        cdef int top
        cdef int pending = 0
        self.reset(homes_from)
        self.retrieval_max = self.parameters.retrieval_max if retrieval_max is None else retrieval_max
        if self.windows == 0:
            return 0
        self.know(0)
        if stepwise:
            self.stepwise = True
            pending = self.start(0, 0)
        else:
            top = self.deepest(0, self.windows - 1)
            if top >= 0:
                pending = self.start(top, 0)
        return -1 if self.missed() else pending

    def resume(self):
        """Go on with what was read; as `begin`."""
        cdef int pending = self.advance()
        return -1 if self.missed() else pending

    def load_segments(self, slots):
        """List these segments for reading, outside of any query; for background work and checks.

        False: rows that are not in memory were wanted; have them loaded and do it again.
        """
        self.previous.clear()
        self.batch.clear()
        self.reset(0)
        for slot in slots:
            self.add(slot)
        return not self.missed()

    def count_candidates(self):
        """(candidates in the routed list, those with the largest match potential) of the deepest window.

        Void where entries were wanted that are not in memory (RoutingDirectory.missed).
        """
        cdef int top
        if self.windows == 0:
            return 0, 0
        self.know(0)
        top = self.deepest(0, self.windows - 1)
        if top < 0:
            return 0, 0
        return self.points.count_candidates(
            self.ids + <Py_ssize_t>top * self.parameters.segment_blocks, self.window_blocks(top)
        )
