"""Dagster assets and asset checks."""
