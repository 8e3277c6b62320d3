"""The base class of the exporters of metrics."""

from collections.abc import Callable, Sequence
from typing import Final

from kcl_pipeline.metrics.instruments import Attributes, Instrument, MetricValue

CLOSE_SECONDS: Final = 5.0
"""How long the end of a worker waits for values that are not exported yet."""


IsGone = Callable[[Instrument, Attributes], bool]
"""Whether the series of an instrument with these attributes will get no further value."""


class Exporter:
    """Takes values of metrics. Thread-safe. No method makes a call that may block.

    An exporter that keeps no series, or needs no end, inherits the methods that do nothing.
    """

    name: str

    def record(self, values: Sequence[MetricValue]) -> None:
        """Take the values of one event. The settings have removed metrics and dimensions."""

    def forget(self, is_gone: IsGone) -> None:
        """Remove the series that are gone, if the exporter keeps series."""

    def close(self, seconds: float) -> None:
        """Export what is left, and end, within about this time."""
