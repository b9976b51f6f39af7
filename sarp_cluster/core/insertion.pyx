# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Insertion: what changes when a worker newly holds blocks of a sequence, or no longer does (paper §4.1; design §4, §6).

An Insertion searches like a match but without a cap, so that it makes no duplicates, and only from the window in which the
worker's new blocks begin: its cost follows what is added, not the history. Then, for each window:

* all blocks are there: only the worker's location runs change, at the blocks' homes;
* the sequence goes on where a stored segment ends: that segment is extended in place;
* it diverges inside a segment: a new segment copies the shared block IDs but not their locations, and names as its origin
  the segment that holds the block before the fork; the rest of the sequence gets new segments.

`plan` only fills `writes`. The caller gives them to the store, which notes in each where it stands, and `commit` enters
them in the table and the directory: no await between the last search and the commit, or the search starts again.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memmove

from sarp_cluster.core.block_id cimport NamespaceKey
from sarp_cluster.core.matching cimport HOMES_MAX, Home, Search
from sarp_cluster.core.routing_points cimport RoutingPoints
from sarp_cluster.core.segment cimport (
    DAMAGED,
    DELTA,
    IMAGE,
    READ,
    LocationRun,
    SegmentBatch,
    SegmentColumns,
    blocks_mask,
    mask_runs,
)
from sarp_cluster.core.segment_table cimport SegmentTable
from sarp_cluster.core.worker_table cimport WorkerTable

from sarp_cluster import limits
from sarp_cluster.errors import CorruptRecordError, InvariantViolationError, TooLargeError, UnknownPrefixError

cdef int NO_CAP = 2**31 - 1
cdef uint32_t RUNS_MAX = limits.LOCATION_RUNS_MAX


cdef class Insertion:
    """One change of a worker's locations. Objects are reused."""

    def __init__(self, Search search, RoutingPoints points, SegmentTable table, WorkerTable workers):
        self.search = search
        self.points = points
        self.table = table
        self.workers = workers
        self.writes = SegmentBatch()

    # --- searching -----------------------------------------------------------------------------------------------------

    def load(self, bytes wire, NamespaceKey key, uint32_t namespace_id, int base_window, int first):
        """Take the sequence: wire IDs from window `base_window` on; `first` counts blocks from there."""
        self.search.load(wire, key, namespace_id, base_window)
        self.first = first

    def begin(self):
        """Search what is there. Returns how many segments of `search.batch` are to be read; 0: done; -1: as Search.begin."""
        cdef int first_window = self.first // self.search.parameters.segment_blocks
        cdef int top
        self.search.reset(first_window)
        self.search.retrieval_max = NO_CAP
        self.search.healing = True
        top = self.search.deepest(0, self.search.windows - 1)
        self.low = max(0, min(top, first_window))
        self.search.know(self.low)
        if top < 0:
            return -1 if self.search.missed() else 0
        return self.settle(self.search.start(top, self.low))

    def resume(self):
        """Go on with what was read; as `begin`."""
        return self.settle(self.search.advance())

    cdef int settle(self, int pending) except -2:
        """Where not even the lowest window verified, look one window further down."""
        while pending == 0 and self.low > 0 and self.search.verified <= self.low * self.search.parameters.segment_blocks:
            self.low -= 1
            self.search.know(self.low)
            pending = self.search.start(self.low, self.low)
        return -1 if self.search.missed() else pending

    @property
    def unchanged(self):
        """Is the index as it was when the search began? Otherwise begin again."""
        return self.search.unchanged()

    # --- planning ------------------------------------------------------------------------------------------------------

    def damaged(self):
        """Slots of segments that the search met, that cannot be read, and that it could not heal.

        What they held is not known. Going round them could store blocks a second time, and a block with two homes could be
        answered with a holder that was removed from one of them.
        """
        cdef int item
        return list({
            self.search.batch.item[item].slot: None for item in range(self.search.batch.count)
            if self.search.batch.item[item].state == DAMAGED
        })

    def check_prefix(self, bint rooted):
        """Raise UnknownPrefixError if the first window needs ancestors (it is not `rooted`) and is not in the index."""
        if not rooted and self.search.verified == 0:
            raise UnknownPrefixError(
                "offset: the blocks before it are not in the index; send the block IDs from position 0", field="offset"
            )

    def plan(self, uint32_t worker, uint32_t generation, int tier, handle):
        """Fill `writes` with what an insert changes. Returns how many segments that are.

        -1: rows or entries that are not in memory will be wanted; nothing is planned. Have them loaded, search again.
        """
        cdef Location location = Location(worker, generation, tier, handle is not None, handle or 0)
        cdef int size = self.search.parameters.segment_blocks
        cdef int window = self.search.verified // size
        cdef int matched = self.search.verified % size
        cdef int first_window = self.first // size
        cdef int blocks, w
        cdef uint32_t parent = 0
        self.writes.clear()
        self.blocks_added = 0
        try:
            for w in range(min(self.low, first_window), min(window, self.search.windows)):
                if self.search.batch.item[self.search.path[w]].write:
                    self.edit(self.search.path[w])  # healed by this search
                self.hold_window(w, size, self.first - w * size, size, &location)
            if window < self.search.windows:
                blocks = self.search.window_blocks(window)
                if matched == blocks:
                    self.hold_window(window, blocks, self.first - window * size, blocks, &location)
                elif matched and self.search.batch.item[self.search.path[window]].count == matched:
                    parent = self.extend(window, matched, &location)
                else:
                    if matched:
                        parent = self.search.batch.item[self.search.path[window]].parent
                    elif window:
                        parent = self.search.batch.item[self.search.path[window - 1]].slot
                    parent = self.new_segment(window, matched, parent, &location)
                for w in range(window + 1, self.search.windows):
                    parent = self.new_segment(w, 0, parent, &location)
            self.choose_writes()
        except BaseException:
            self.abort()
            raise
        if not self.all_in_memory():
            self.abort()
            return -1
        return self.writes.count

    cdef bint all_in_memory(self) noexcept:
        """Will `commit` find all it looks at? Otherwise what is missing has been noted."""
        cdef SegmentColumns* segment
        cdef int write, count_before
        if self.search.directory.unloaded:
            for write in range(self.writes.count):
                segment = &self.writes.item[write]
                count_before = self.table.row(segment.slot).count
                if segment.count != count_before or segment.image_count == 0:
                    self.points.touch(segment.slot, segment.ids, segment.count, count_before)
        return not self.search.missed()

    def plan_removal(self, uint32_t worker, uint32_t generation, int tier):
        """Fill `writes` with what changes when the worker no longer holds [first, end of the sequence) on a tier (-1: any).

        -1: as `plan`.
        """
        cdef Location location = Location(worker, generation, tier, False, 0)
        cdef Home homes[HOMES_MAX]
        cdef int size = self.search.parameters.segment_blocks
        cdef int window, matched, i, count
        self.writes.clear()
        self.blocks_added = 0
        for window in range(self.first // size, (self.search.verified + size - 1) // size):
            if self.search.batch.item[self.search.path[window]].write:
                self.edit(self.search.path[window])  # healed by this search
            matched = min(size, self.search.verified - window * size)
            count = self.all_homes(window, matched, homes)
            for i in range(count):
                self.release(
                    homes[i].item, &location, blocks_mask(max(homes[i].begin, self.first - window * size), homes[i].end)
                )
        self.choose_writes()
        if self.search.missed():
            self.abort()
            return -1
        return self.writes.count

    def plan_healed(self):
        """Fill `writes` with the segments that the search healed, where they are still as it met them; -1: as `plan`."""
        cdef SegmentColumns* segment
        cdef int item
        self.writes.clear()
        self.blocks_added = 0
        for item in range(self.search.batch.count):
            segment = &self.search.batch.item[item]
            if (segment.write and segment.image == self.table.row(segment.slot).image
                    and segment.delta == self.table.row(segment.slot).delta):
                self.edit(item)
        if not self.all_in_memory():
            self.abort()
            return -1
        return self.writes.count

    def plan_folds(self):
        """Fill `writes` with whole images of the segments that were read (Search.load_segments), where they still hold."""
        cdef SegmentColumns* segment
        cdef int item
        self.writes.clear()
        self.blocks_added = 0
        for item in range(self.search.batch.count):
            segment = &self.search.batch.item[item]
            if (segment.state == READ and segment.image == self.table.row(segment.slot).image
                    and segment.delta == self.table.row(segment.slot).delta):
                self.writes.item[self.edit(item)].write = IMAGE
        return self.writes.count

    cdef int edit(self, int item) except -1:
        """The write that changes a segment that was read; there is room in it for one more run."""
        cdef SegmentColumns* segment = &self.search.batch.item[item]
        cdef int write
        for write in range(self.writes.count - 1, -1, -1):
            if self.writes.item[write].slot == segment.slot:
                return write
            if self.writes.item[write].window != segment.window:
                break  # writes are planned window by window
        self.writes.reserve_runs(segment.runs_count + 1)
        write = self.writes.append()
        self.writes.item[write] = segment[0]
        self.writes.item[write].runs_begin = self.writes.run_count
        if segment.runs_count:
            memcpy(&self.writes.run[self.writes.run_count], &self.search.batch.run[segment.runs_begin],
                   segment.runs_count * sizeof(LocationRun))
        self.writes.run_count += segment.runs_count + 1
        return write

    cdef int hold(self, int item, const Location* location, uint64_t mask) except -1:
        """The worker holds these blocks of a segment that was read. No write when that is known."""
        cdef SegmentColumns* segment = &self.search.batch.item[item]
        cdef LocationRun* run
        cdef uint32_t r
        for r in range(segment.runs_begin, segment.runs_begin + segment.runs_count):
            run = &self.search.batch.run[r]
            if (run.worker == location.worker and run.generation == location.generation and run.tier == location.tier
                    and run.has_handle == location.has_handle and run.handle == location.handle
                    and run.mask & mask == mask):
                return 0
        return self.put_run(self.edit(item), location, mask)

    cdef int all_homes(self, int window, int matched, Home* homes) except -1:
        """Search.homes of all of a window's first `matched` blocks. Raises CorruptRecordError where one does not verify."""
        cdef int count = self.search.homes(window, matched, homes)
        if (homes[count - 1].end if count else 0) != matched:
            raise CorruptRecordError(f"the home of a block of window {window} is damaged")
        return count

    cdef int hold_window(self, int window, int matched, int begin, int end, const Location* location) except -1:
        """The worker holds blocks [begin, end) of a window whose first `matched` blocks are there."""
        cdef Home homes[HOMES_MAX]
        cdef int count, i
        cdef uint64_t mask
        begin = max(begin, 0)
        if begin >= end:
            return 0
        count = self.all_homes(window, matched, homes)
        for i in range(count):
            mask = blocks_mask(max(begin, homes[i].begin), min(end, homes[i].end))
            if mask:
                self.hold(homes[i].item, location, mask)
        return 0

    cdef bint alive(self, const LocationRun* run, const Location* location) noexcept nogil:
        """Does a run still count once this change is made? Only then is the worker entered, and its newer generation."""
        if run.worker == location.worker:
            return run.generation == location.generation
        return self.workers.alive(run.worker, run.generation)

    cdef int put_run(self, int write, const Location* location, uint64_t mask) except -1:
        """Enter blocks in a write's runs (segment R1, R2); runs of dead generations go on the occasion."""
        cdef SegmentColumns* segment = &self.writes.item[write]
        cdef LocationRun* runs = &self.writes.run[segment.runs_begin]
        cdef LocationRun run
        cdef uint32_t kept = 0
        cdef uint32_t place = 0
        cdef uint32_t r
        cdef bint placed = False
        for r in range(segment.runs_count):
            run = runs[r]
            if not self.alive(&run, location):
                continue
            if run.worker == location.worker and run.tier == location.tier:
                if run.has_handle == location.has_handle and run.handle == location.handle:
                    run.mask |= mask
                    placed = True
                else:
                    run.mask &= ~mask  # the newest handle of a block holds
                    if run.mask == 0:
                        continue
            if run.worker < location.worker or (run.worker == location.worker and run.tier <= location.tier):
                place = kept + 1
            runs[kept] = run
            kept += 1
        if not placed:
            memmove(&runs[place + 1], &runs[place], (kept - place) * sizeof(LocationRun))
            runs[place] = LocationRun(
                mask, location.handle, location.worker, location.generation, location.tier, location.has_handle
            )
            kept += 1
        segment.runs_count = kept
        return 0

    cdef int release(self, int item, const Location* location, uint64_t mask) except -1:
        """The worker no longer holds these blocks of a segment that was read."""
        cdef SegmentColumns* segment = &self.search.batch.item[item]
        cdef LocationRun* runs
        cdef LocationRun run
        cdef uint32_t kept = 0
        cdef uint32_t r
        cdef int write
        cdef bint held = False
        for r in range(segment.runs_begin, segment.runs_begin + segment.runs_count):
            run = self.search.batch.run[r]
            held = held or (run.worker == location.worker and run.mask & mask
                            and (location.tier < 0 or run.tier == location.tier))
        if not held:
            return 0
        write = self.edit(item)
        segment = &self.writes.item[write]
        runs = &self.writes.run[segment.runs_begin]
        for r in range(segment.runs_count):
            run = runs[r]
            if run.worker == location.worker and (location.tier < 0 or run.tier == location.tier):
                run.mask &= ~mask
            if run.mask and self.alive(&run, location):
                runs[kept] = run
                kept += 1
        segment.runs_count = kept
        return 0

    cdef uint32_t extend(self, int window, int matched, const Location* location) except 0:
        """The sequence goes on where the window's segment ends: extend that in place."""
        cdef int item = self.search.path[window]
        cdef int size = self.search.parameters.segment_blocks
        cdef int blocks = self.search.window_blocks(window)
        cdef int begin = max(self.first - window * size, 0)
        cdef int write
        self.hold_window(window, matched, begin, matched, location)
        write = self.edit(item)
        memcpy(&self.writes.item[write].ids[matched],
               &self.search.ids[<Py_ssize_t>window * size + matched], (blocks - matched) * sizeof(uint64_t))
        self.writes.item[write].count = blocks
        self.blocks_added += blocks - matched
        begin = max(begin, matched)
        if begin < blocks:
            self.put_run(write, location, blocks_mask(begin, blocks))
        return self.writes.item[write].slot

    cdef uint32_t new_segment(self, int window, int fork, uint32_t parent, const Location* location) except 0:
        """A segment for a window of which `fork` blocks are there, in another segment that goes on differently."""
        cdef int size = self.search.parameters.segment_blocks
        cdef int blocks = self.search.window_blocks(window)
        cdef int begin = max(self.first - window * size, 0)
        cdef SegmentColumns* segment
        cdef SegmentColumns* shared
        cdef int write
        cdef uint32_t slot
        if fork:
            self.hold_window(window, fork, begin, fork, location)
        self.writes.reserve_runs(2)
        write = self.writes.append()
        self.writes.item[write].slot = 0
        slot = self.table.allocate()
        segment = &self.writes.item[write]
        segment.slot = slot
        segment.tag = self.table.row(slot).tag
        segment.window = self.search.base_window + window
        segment.image = 0
        segment.delta = 0
        segment.namespace_id = self.search.namespace_id
        segment.parent = parent
        segment.parent_tag = self.table.row(parent).tag if parent else 0
        segment.origin = 0
        segment.origin_tag = 0
        segment.fork = fork
        segment.count = blocks
        segment.count_before = 0
        segment.image_count = 0
        segment.state = READ
        segment.write = IMAGE
        segment.origin_item = -1
        segment.matched = 0
        segment.runs_begin = self.writes.run_count
        segment.runs_count = 0
        self.writes.run_count += 1
        if fork:
            shared = &self.search.batch.item[self.search.path[window]]
            segment.origin = shared.slot
            while self.table.row(segment.origin).fork >= fork:
                segment.origin = self.table.row(segment.origin).origin
            segment.origin_tag = self.table.row(segment.origin).tag
        memcpy(segment.ids, &self.search.ids[<Py_ssize_t>window * size], blocks * sizeof(uint64_t))
        self.blocks_added += blocks - fork
        begin = max(begin, fork)
        if begin < blocks:
            self.put_run(write, location, blocks_mask(begin, blocks))
        return slot

    cdef int choose_writes(self) except -1:
        """Image or delta? A delta holds what the image lacks and all runs; it is folded once it nears the image's size."""
        cdef SegmentColumns* segment
        cdef int write, lacking
        cdef uint32_t r, stored
        for write in range(self.writes.count):
            segment = &self.writes.item[write]
            stored = 0
            for r in range(segment.runs_begin, segment.runs_begin + segment.runs_count):
                stored += mask_runs(self.writes.run[r].mask)
            if stored > RUNS_MAX:
                raise TooLargeError(
                    f"worker: a segment's blocks would have {stored} location runs, "
                    f"the limit is {limits.LOCATION_RUNS_MAX}",
                    field="worker",
                )
            if segment.write:
                continue
            lacking = segment.count - segment.image_count
            if (lacking and segment.count == self.search.parameters.segment_blocks) or (
                2 * (8 * lacking + 12 * <int>stored) >= 8 * segment.image_count
            ):
                segment.write = IMAGE
            else:
                segment.write = DELTA
        return 0

    # --- carrying out --------------------------------------------------------------------------------------------------

    def commit(self):
        """Enter the writes, which now stand in the store, in the table and the directory."""
        cdef SegmentColumns* segment
        cdef int write, count_before
        self.healed = 0
        for write in range(self.writes.count):
            segment = &self.writes.item[write]
            count_before = self.table.row(segment.slot).count
            self.table.store(segment)
            if segment.count != count_before:
                self.points.register(segment.slot, segment.ids, segment.count, count_before)
            elif segment.image_count == 0:
                # It was healed. While it could not be read, it was registered nowhere anew.
                self.points.register(segment.slot, segment.ids, segment.count, 0)
                self.healed += 1
        if self.search.missed():
            raise InvariantViolationError("a change was entered that wanted what is not in memory")

    def lost_places(self):
        """Where the records stand of the segments that were healed and are about to be put."""
        cdef SegmentColumns* segment
        cdef int write
        places = []
        for write in range(self.writes.count):
            segment = &self.writes.item[write]
            if segment.count_before and segment.image_count == 0:
                places += [segment.image, segment.delta]
        return places

    def abort(self):
        """Give back the slots of new segments that were not written."""
        cdef int write
        for write in range(self.writes.count):
            if self.writes.item[write].slot and self.table.row(self.writes.item[write].slot).count == 0:
                self.table.release(self.writes.item[write].slot)
        self.writes.clear()
