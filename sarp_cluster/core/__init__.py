"""The SARP algorithm: pure, compiled where hot. No I/O, no clock, no randomness."""
