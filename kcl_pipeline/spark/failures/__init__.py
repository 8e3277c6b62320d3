"""Classify errors of Spark jobs, and find the records that cause them."""
