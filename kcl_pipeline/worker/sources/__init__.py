"""Batch sources of a worker."""
