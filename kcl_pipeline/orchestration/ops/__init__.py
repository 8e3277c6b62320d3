"""Dagster ops: one worker per run."""
