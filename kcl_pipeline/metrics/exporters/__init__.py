"""Where events and metrics go: log lines, CloudWatch, Prometheus and OpenTelemetry."""

from kcl_pipeline.metrics.exporters.log import (
    LoggingEvents,
    facts_of,
    fan_out,
    level_of,
    name_of,
    text_of,
)

__all__ = ["LoggingEvents", "facts_of", "fan_out", "level_of", "name_of", "text_of"]
