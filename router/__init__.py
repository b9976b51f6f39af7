"""The front door: from a request to the shards that own its stretches, and back to one answer."""
