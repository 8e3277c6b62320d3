"""Leases: their values, their rows, and the conditional writes of rows."""
