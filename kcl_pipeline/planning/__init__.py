"""Pure functions: shard graph to leases, leases and workers to moves."""
