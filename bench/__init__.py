"""Measurements: our index against its baselines, and the paper's experiments."""
