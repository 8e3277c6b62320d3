"""Create missing leases, and restore deleted ones (protocol §7)."""
