"""Lead an application: lock, shard sync, assignment and cleanup."""
