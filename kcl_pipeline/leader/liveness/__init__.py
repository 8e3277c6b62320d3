"""Decide which leases have expired and which workers are alive (protocol §5.3)."""
