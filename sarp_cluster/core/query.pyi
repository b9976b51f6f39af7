class Query:
    """Block IDs of one sequence, from the window `base_window` on."""

    blocks: int
    windows: int
