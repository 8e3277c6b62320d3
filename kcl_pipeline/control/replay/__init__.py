"""Replay a time range of the streams, with an application of its own."""
