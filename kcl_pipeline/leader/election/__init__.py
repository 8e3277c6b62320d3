"""Acquire and hold the leader lock."""
