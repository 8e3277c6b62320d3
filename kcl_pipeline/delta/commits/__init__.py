"""Announce, combine and encode commits."""
