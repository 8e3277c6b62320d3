"""The life of a shard whose lease a worker holds."""
