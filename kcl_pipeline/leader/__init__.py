"""The elected leader: lock, shard sync, cleanup, assignment."""
