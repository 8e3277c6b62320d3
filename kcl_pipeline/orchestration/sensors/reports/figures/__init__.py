"""Draw the figures of the lease table: lag, load and shards. Needs the extra `figures`."""
