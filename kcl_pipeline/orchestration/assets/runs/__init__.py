"""Dagster runs of an application as plain values."""
