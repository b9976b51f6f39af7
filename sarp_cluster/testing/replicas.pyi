from sarp_cluster.core.segment import SegmentBatch

def fill_replica(
    template: SegmentBatch, out: SegmentBatch, begin: int, end: int, shared: int, mask: int, slots: int
) -> None:
    """Make `out` the replica of the template's segments begin..end-1: their slots go up by `slots`."""
