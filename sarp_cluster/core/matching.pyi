from collections.abc import Iterable

from sarp_cluster.core.block_id import NamespaceKey
from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.query import Query
from sarp_cluster.core.routing_directory import RoutingDirectory
from sarp_cluster.core.routing_points import RoutingPoints
from sarp_cluster.core.segment import SegmentBatch
from sarp_cluster.core.segment_table import SegmentTable

class Search(Query):
    """One query's way through the index. Objects are reused: `load` and `begin` start anew and keep the buffers."""

    batch: SegmentBatch
    """Segments to be read; `previous` records are already filled in."""
    verified: int
    reads: int
    waves: int
    retrieved: int
    windows_routed: int

    def __init__(
        self, parameters: SarpParameters, directory: RoutingDirectory, points: RoutingPoints, table: SegmentTable
    ) -> None: ...
    def load(self, wire: bytes, key: NamespaceKey, namespace_id: int, base_window: int) -> None: ...
    def begin(self, stepwise: bool, homes_from: int = 0, retrieval_max: int | None = None) -> int: ...
    def resume(self) -> int: ...
    def load_segments(self, slots: Iterable[int]) -> bool: ...
    def count_candidates(self) -> tuple[int, int]: ...
