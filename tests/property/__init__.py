"""Whatever happens in whatever order: the index answers as the brute-force oracle does."""
