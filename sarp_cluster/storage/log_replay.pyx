# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Replaying log files: from their bytes to rows of the segment table. The caller knows files, this knows records.

Records carry consecutive LSNs over all files, and stand in groups, each of which ends with a GROUP record. A group is
replayed as a whole or not at all: its records are *staged*, and entered once its end verifies. Reading stops at the first
record that does not verify or breaks the order; whether what follows the last whole group is a torn tail or damage is for
the caller to say, by the durable LSNs that later groups vouch for.

There are two ways. Replaying the *whole* log gives every row its newest state, and `finish_restore` counts what they imply.
Replaying the *tail* behind a snapshot changes a table that is not loaded (core.table_replay), and hands on what the log says
of the routing directory.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from sarp_cluster.core cimport table_replay
from sarp_cluster.core.posting_tree cimport FIRST_SLOT
from sarp_cluster.core.segment cimport SEGMENT_BLOCKS, SegmentColumns, pack_place, place_file, place_length, place_offset
from sarp_cluster.core.segment_row cimport SegmentRow
from sarp_cluster.core.segment_table cimport SegmentTable
from sarp_cluster.storage.record cimport (
    DELTA_RECORD,
    FRAME_BYTES,
    GROUP_RECORD,
    IMAGE_RECORD,
    LOST_RECORD,
    REMOVAL_RECORD,
    ROUTING_RECORD,
    DeltaHeader,
    Frame,
    ImageHeader,
    RemovalHeader,
    check_frame,
)

from typing import NamedTuple

from sarp_cluster.errors import InvariantViolationError

cdef struct Staged:
    const uint8_t* payload
    uint64_t place
    uint64_t lsn
    uint32_t payload_bytes
    uint32_t kind


class Senseless(NamedTuple):
    """A record of a whole group that verifies but cannot be: what it changes is not there, or not as it says."""

    file: int
    offset: int
    lsn: int


cdef class LogReplay:
    """One replay, over one file after the other."""
    cdef SegmentTable table
    cdef bint tail
    cdef readonly uint64_t lsn             # of the last record that verified
    cdef readonly uint64_t applied_lsn     # of the last whole group
    cdef readonly uint32_t applied_file    # where that ends
    cdef readonly uint64_t applied_offset
    cdef readonly uint64_t segment_bytes   # of the images and deltas that were replayed
    cdef readonly list others              # (type, payload) of all records but segments, headers and groups
    cdef readonly list routing             # payloads of routing records; in a tail only
    cdef readonly list senseless
    cdef readonly bint gaps                # files are missing that were reclaimed: what they had was written anew
    cdef bint skipped                      # records are missing that could not be read
    cdef set orphans                       # slots with a delta whose image was in such a file, or was such a record
    cdef list held                         # what staged records stand in
    cdef Staged* staged
    cdef size_t staged_count
    cdef size_t staged_capacity

    def __init__(self, SegmentTable table, *, uint64_t lsn=0, uint32_t file=0, uint64_t offset=0, bint tail=False):
        self.table = table
        self.tail = tail
        self.lsn = self.applied_lsn = lsn
        self.applied_file = file
        self.applied_offset = offset
        self.others = []
        self.routing = []
        self.senseless = []
        self.orphans = set()
        self.held = []

    def __dealloc__(self):
        free(self.staged)

    @property
    def staged_records(self):
        """Records that verified and whose group has not ended."""
        return self.staged_count

    def resume(self, uint64_t lsn, *, bint reclaimed=False):
        """Go on behind records that are missing, through this LSN; `reclaimed`: and are not needed."""
        self.lsn = lsn
        self.gaps = self.gaps or reclaimed

    def skip(self):
        """Go on behind one record that does not verify and is not needed."""
        if self.tail:
            raise InvariantViolationError("what a record behind a snapshot changed must be known")
        self.lsn += 1
        self.skipped = True

    def feed(self, data, uint32_t file, uint64_t begin=0, uint64_t base=0):
        """Replay a log file, of which `data` has all from offset `base` on, from offset `begin` on.

        Returns the offset at which that ended: the file's length when all of it verified.
        """
        cdef const uint8_t[::1] view = data
        cdef uint64_t length = base + view.shape[0]
        cdef const uint8_t* bytes_at
        cdef int found
        if view.shape[0] == 0:
            return begin
        bytes_at = &view[0] - base
        if self.staged_count == 0:
            self.held.clear()
        self.held.append(memoryview(data))
        while True:
            with nogil:
                found = self.read_group(bytes_at, length, file, &begin)
            if found < 0:
                raise MemoryError("replay")
            if not found:
                return begin
            self.enter_group()
            self.applied_lsn = self.lsn
            self.applied_file = file
            self.applied_offset = begin
            self.held = [self.held.pop()]

    cdef int read_group(self, const uint8_t* data, uint64_t length, uint32_t file, uint64_t* at) noexcept nogil:
        """Stage records up to the end of the group. 1: it is whole; 0: the data ends, or a record does not verify."""
        cdef Frame frame
        cdef uint64_t offset = at[0]
        cdef uint64_t size
        cdef int kind = 0
        while kind != GROUP_RECORD and offset < length and length - offset >= FRAME_BYTES:
            kind = check_frame(data + offset, <uint32_t>min(length - offset, <uint64_t>0xFFFFFFFFu), file, offset)
            if kind < 0:
                break
            memcpy(&frame, data + offset, FRAME_BYTES)
            size = (FRAME_BYTES + <uint64_t>frame.payload_bytes + 7) & ~<uint64_t>7
            if frame.lsn != self.lsn + 1 or size > length - offset:
                kind = 0
                break
            if kind != GROUP_RECORD:
                if self.staged_count == self.staged_capacity and not self.grow():
                    return -1
                self.staged[self.staged_count] = Staged(
                    data + offset + FRAME_BYTES, pack_place(file, offset, <uint32_t>size), frame.lsn, frame.payload_bytes, kind
                )
                self.staged_count += 1
            self.lsn = frame.lsn
            offset += size
        at[0] = offset
        return kind == GROUP_RECORD

    cdef bint grow(self) noexcept nogil:
        cdef size_t capacity = 1_024 if self.staged_capacity == 0 else 2 * self.staged_capacity
        cdef Staged* staged = <Staged*>realloc(self.staged, capacity * sizeof(Staged))
        if staged == NULL:
            return False
        self.staged = staged
        self.staged_capacity = capacity
        return True

    cdef int enter_group(self) except -1:
        """Do what the staged records say."""
        cdef Staged* record
        cdef size_t i
        cdef bint sound
        for i in range(self.staged_count):
            record = &self.staged[i]
            sound = True
            if record.kind == IMAGE_RECORD:
                sound = self.enter_image(record)
                self.segment_bytes += place_length(record.place)
            elif record.kind == DELTA_RECORD:
                sound = self.enter_delta(record)
                self.segment_bytes += place_length(record.place)
            elif record.kind == REMOVAL_RECORD:
                sound = self.enter_removal(record)
            elif record.kind == ROUTING_RECORD:
                if self.tail:
                    self.routing.append(record.payload[: record.payload_bytes])
            else:
                self.others.append((record.kind, record.payload[: record.payload_bytes]))
            if not sound:
                self.senseless.append(Senseless(place_file(record.place), place_offset(record.place), record.lsn))
        self.staged_count = 0
        return 0

    cdef bint enter_image(self, const Staged* record) except -1:
        """Enter a whole segment. False if the record makes no sense."""
        cdef ImageHeader whole
        cdef SegmentColumns columns
        if record.payload_bytes < sizeof(ImageHeader):
            return False
        memcpy(&whole, record.payload, sizeof(ImageHeader))
        if whole.count == 0 or whole.count > SEGMENT_BLOCKS or whole.fork > whole.count:
            return False
        columns.slot = whole.slot
        columns.tag = whole.tag
        columns.window = whole.window
        columns.namespace_id = whole.namespace_id
        columns.parent = whole.parent
        columns.origin = whole.origin
        columns.fork = whole.fork
        columns.count = whole.count
        columns.image = record.place
        columns.delta = 0
        if self.tail:
            columns.count_before = whole.count_before
            return table_replay.replay_image(self.table, &columns, whole.had_delta)
        self.orphans.discard(whole.slot)
        return self.table.restore(&columns, self.gaps)

    cdef bint enter_delta(self, const Staged* record) except -1:
        """Enter what a segment's image lacks. False if the record makes no sense, or there is no such segment."""
        cdef DeltaHeader more
        cdef SegmentRow* row
        if record.payload_bytes < sizeof(DeltaHeader):
            return False
        memcpy(&more, record.payload, sizeof(DeltaHeader))
        if more.count > SEGMENT_BLOCKS or more.count < more.image_count or more.slot < FIRST_SLOT:
            return False
        if self.tail:
            return table_replay.replay_delta(
                self.table, more.slot, more.tag, more.namespace_id, record.place, more.count, more.count_before, more.had_delta
            )
        if more.slot < self.table.next_slot:
            row = self.table.row(more.slot)
            if row.count and row.tag == more.tag and row.namespace_id == more.namespace_id:
                row.delta = record.place
                row.count = more.count
                return True
        if self.gaps or self.skipped:  # its image is not there any more: then the segment was written anew, behind this
            self.orphans.add(more.slot)
        return self.gaps or self.skipped

    cdef bint enter_removal(self, const Staged* record) except -1:
        """Enter that a segment is gone. False if the record makes no sense, or there is no such segment.

        One that says it again has a free row before it, or images of which the record that it stands for is reclaimed.
        """
        cdef RemovalHeader gone
        cdef SegmentColumns columns
        cdef SegmentRow* row
        cdef bint again
        if record.payload_bytes != sizeof(RemovalHeader):
            return False
        memcpy(&gone, record.payload, sizeof(RemovalHeader))
        again = gone.count == 0
        if gone.slot < FIRST_SLOT or gone.count > SEGMENT_BLOCKS or gone.fork > gone.count:
            return False
        if self.tail:
            columns.slot = gone.slot
            columns.tag = gone.tag
            columns.parent = gone.parent
            columns.origin = gone.origin
            columns.fork = gone.fork
            columns.count = gone.count
            columns.delta = gone.had_delta
            return again or table_replay.replay_removal(self.table, &columns, gone.stale)
        self.orphans.discard(gone.slot)
        if gone.slot >= self.table.next_slot:  # its image is not there any more
            return self.gaps or self.skipped
        row = self.table.row(gone.slot)
        if not (again or self.gaps or self.skipped or row.count and row.tag == gone.tag):
            return False
        row.count = 0
        row.delta = 0
        return True

    def missing_images(self):
        """Slots with a delta whose image was never found, although nothing but a later image makes that sound."""
        return sorted(self.orphans)


def highest_mark(const uint8_t[::1] data, uint64_t begin, uint32_t file):
    """The highest durable LSN that a record vouches for that verifies in `data`, a log file from offset `begin` on; 0: none."""
    cdef uint64_t length = data.shape[0]
    cdef uint64_t at = 0
    cdef uint64_t mark
    cdef uint64_t highest = 0
    while length >= FRAME_BYTES + 8 and at <= length - FRAME_BYTES - 8:
        if check_frame(&data[at], <uint32_t>min(length - at, 0xFFFFFFFFu), file, begin + at) == GROUP_RECORD:
            memcpy(&mark, &data[at + FRAME_BYTES], 8)
            highest = max(highest, mark)
        at += 8
    return highest


def lost_places(const uint8_t[::1] data, uint32_t file):
    """The places that records in `data`, a log file, say need not be read."""
    cdef uint64_t length = data.shape[0]
    cdef uint64_t at = 0
    cdef uint64_t place
    found = []
    while length >= FRAME_BYTES + 8 and at <= length - FRAME_BYTES - 8:
        if check_frame(&data[at], <uint32_t>min(length - at, 0xFFFFFFFFu), file, at) == LOST_RECORD:
            memcpy(&place, &data[at + FRAME_BYTES], 8)
            found.append(place)
        at += 8
    return found


def live_bytes(SegmentTable table):
    """Bytes of all records that a segment points to."""
    cdef uint64_t total = 0
    cdef uint32_t slot
    for slot in range(FIRST_SLOT, table.next_slot):
        if table.row(slot).count:
            total += place_length(table.row(slot).image)
            if table.row(slot).delta:
                total += place_length(table.row(slot).delta)
    return total


def next_record(const uint8_t[::1] data, uint64_t begin, uint32_t file):
    """(offset, LSN) of the first record at or behind `begin` that verifies; (length, 0) if there is none."""
    cdef uint64_t offset = (begin + 7) & ~<uint64_t>7
    cdef uint64_t length = data.shape[0]
    cdef Frame frame
    while length >= FRAME_BYTES and offset <= length - FRAME_BYTES:
        if check_frame(&data[offset], <uint32_t>min(length - offset, 0xFFFFFFFFu), file, offset) >= 0:
            memcpy(&frame, &data[offset], FRAME_BYTES)
            # Its padding has to be there, too: without it replay does not take the record.
            if ((FRAME_BYTES + <uint64_t>frame.payload_bytes + 7) & ~<uint64_t>7) <= length - offset:
                return offset, frame.lsn
        offset += 8
    return length, 0
