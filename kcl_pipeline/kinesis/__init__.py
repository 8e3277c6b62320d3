"""From a shard position to an Arrow table with its end position."""
