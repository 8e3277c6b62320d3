"""The demonstration that `make run` and `make dev` show: orders and this host's telemetry, through
resharding and a changing fleet.
"""
