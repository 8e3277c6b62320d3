"""The Kinesis Client Library 3.x in Python, as a Dagster package."""

__version__ = "0.1.0"
