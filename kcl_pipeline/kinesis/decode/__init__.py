"""Decode response bodies of GetRecords into Arrow columns."""
