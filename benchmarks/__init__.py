"""Benchmarks that print metrics; run each as `python -m benchmarks.<name>`."""
