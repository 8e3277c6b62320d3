"""What a simulated fleet must keep: the invariants of the sink, of the leases and of the leader."""
