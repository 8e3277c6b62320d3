"""The interface of a sink, and its implementation for every format that stores positions.

`sink.Sink` is what a worker sees. `table.TableSink` implements it once over a `log.Log`, which a
format implements. docs/contributing/add-a-sink.md explains how to add one.
"""
