"""Reference models and fault injection, for tests and benchmarks only."""
