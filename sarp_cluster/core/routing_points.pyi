from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.segment import SegmentBatch

class RoutingPoints:
    """Registers segments in a directory and routes queries through it."""

    due: list[tuple[int, int, int]]
    """Back-fills that became due: (key, point, kind). Whoever runs them takes them out."""

    def __init__(self, parameters: SarpParameters, directory: RoutingDirectory) -> None: ...
    def unregistered(self, batch: SegmentBatch) -> list[int]: ...
    def register_batch(self, batch: SegmentBatch) -> int: ...
