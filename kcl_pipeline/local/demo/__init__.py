"""Demonstration that `make run` and `make dev` start.

It processes orders and telemetry of this host while streams are resharded and workers start and
stop.
"""
