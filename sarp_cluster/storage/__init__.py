"""The segment store: the only place that touches the disk."""
