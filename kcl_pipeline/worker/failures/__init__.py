"""Handling of records that the transform cannot process."""
