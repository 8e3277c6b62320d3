"""Implement the default strategy: an even fleet with few moves."""
