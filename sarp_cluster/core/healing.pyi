from sarp_cluster.core.matching import Search

class HealingSearch(Search):
    """The search of an insert: it fills in damaged ancestors."""
