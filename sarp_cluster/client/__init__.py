"""The SDK: a client of a cluster, through its routers or straight to its shards."""
