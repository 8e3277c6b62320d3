"""Rows of workers and of the coordinator: their values and their conditional writes."""
