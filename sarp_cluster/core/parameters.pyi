from sarp_cluster.config import IndexConfig

class SarpParameters:
    """The settings of SARP as the compiled core reads them."""

    def __init__(self, config: IndexConfig) -> None: ...
