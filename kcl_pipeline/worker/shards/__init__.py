"""Processing of a shard while a worker holds its lease."""
