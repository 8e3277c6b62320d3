"""Workloads that print figures; run as `python -m benchmarks.<name>`."""
