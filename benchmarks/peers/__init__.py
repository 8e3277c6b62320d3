"""The consumers that `benchmarks.throughput` measures, each a program of its own that prints how
many records it has taken so far, line by line.
"""
