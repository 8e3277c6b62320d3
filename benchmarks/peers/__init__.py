"""Consumers that `benchmarks.throughput` measures.

Each consumer is a separate program that prints how many records it has read so far, line by line.
"""
