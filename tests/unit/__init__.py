"""Examples, one behaviour a test."""
