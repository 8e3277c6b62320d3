"""Read records from a shard position into an Arrow table with its end position."""
