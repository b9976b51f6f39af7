from sarp_cluster.core.parameters import SarpParameters
from sarp_cluster.core.routing_directory import RoutingDirectory

class RoutingPoints:
    """Registers segments in a directory and routes queries through it."""

    due: list[tuple[int, int, int]]
    """Back-fills that became due: (key, point, kind). Whoever runs them takes them out."""

    def __init__(self, parameters: SarpParameters, directory: RoutingDirectory) -> None: ...
