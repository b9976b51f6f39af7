"""SARP Cluster: a global KVCache index on local SSD that is back at once after a crash.

The library. `core` is the algorithm and does no I/O, `storage` is the only place that touches the disk,
`replay` measures an index on real traces. The services beside this package (`shard`, …) put them together.
"""
