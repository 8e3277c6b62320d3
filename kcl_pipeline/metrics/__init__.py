"""Measure the CPU of this worker, write its metrics row, and export metrics."""
