"""The control plane: health, leases, the slot map, changes without a key, snapshots and recoveries."""
