"""Tests: unit (examples), property (hypothesis against a brute-force oracle)."""
