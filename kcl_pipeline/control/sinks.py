"""Open the sink of a pipeline for an operation."""

from __future__ import annotations

from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.sinks.sink import Sink


def position_sink(sink: object, application_name: str) -> Sink | None:
    """Return a sink that stores positions. None: the sink of the pipeline stores none."""
    return DeltaCommitter(sink, application_name) if isinstance(sink, DeltaSink) else None
