"""Compute leases from shards, and moves from leases and workers, without I/O."""
