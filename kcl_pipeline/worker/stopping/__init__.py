"""Detect the end of a drain, and end a worker."""
