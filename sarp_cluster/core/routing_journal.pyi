class SortedJournal:
    """Changes of a routing directory, in the order of its postings, of each only the last."""

    def __init__(self, payloads: list[bytes]) -> None: ...
