# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Segments made of other segments, millions a second: how a store of any size gets the shape of a real one.

A *template* is the segments of a real index, all read, in the order of their slots, which have no gaps. A *replica* is a
copy of them under other slots, whose block IDs are those of the template with a mask XORed in. The mask's low 16 bits
are 0, so a replica has other routing keys but the same filters. The template's leading `shared` segments are not copied:
replicas that refer to them have them in common, as the sequences under one prompt have the prompt.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from sarp_cluster.core.segment cimport IMAGE, READ, LocationRun, SegmentBatch, SegmentColumns


def fill_replica(SegmentBatch template, SegmentBatch out, int begin, int end, int shared, uint64_t mask, uint32_t slots):
    """Make `out` the replica of the template's segments begin..end-1: their slots go up by `slots`.

    A replica with mask 0 and 0 slots is the template itself, the shared segments included.
    """
    cdef SegmentColumns* source
    cdef SegmentColumns* target
    cdef uint32_t first_copied
    cdef int item, at, block, own
    if not 0 <= begin <= end <= template.count or not 0 <= shared <= template.count:
        raise ValueError(f"segments {begin}..{end} of {template.count}, of which {shared} are shared")
    out.clear()
    if begin == end:
        return
    first_copied = template.item[0].slot + shared
    for item in range(begin, end):
        source = &template.item[item]
        if source.state != READ:
            raise ValueError(f"segment {source.slot} of the template was not read")
        at = out.append()
        target = &out.item[at]
        target[0] = source[0]
        out.reserve_runs(source.runs_count)
        target.runs_begin = out.run_count
        memcpy(&out.run[out.run_count], &template.run[source.runs_begin], source.runs_count * sizeof(LocationRun))
        out.run_count += source.runs_count
        target.image = 0
        target.delta = 0
        target.image_count = 0
        target.count_before = 0
        target.tag = 0
        target.parent_tag = 0
        target.origin_tag = 0
        target.write = IMAGE
        target.slot += slots
        if target.parent >= first_copied:
            target.parent += slots
        own = 0
        if target.origin >= first_copied:
            target.origin += slots
        else:
            own = target.fork  # what is copied of a shared segment stays as it is
        for block in range(own, target.count):
            target.ids[block] ^= mask
