"""Draw the figures of the fleet: lag, load and shards. Needs the extra `figures`."""
