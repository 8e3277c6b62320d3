"""A feed with one exporter, and the documented names of its series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kcl_pipeline import events as ev
from kcl_pipeline.config.metrics import MetricsSettings
from kcl_pipeline.metrics.exporters.exporter import Exporter
from kcl_pipeline.metrics.feed import MetricsFeed
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.event_samples import SAMPLES


class FedExporter:
    """Feeds an exporter with one event of each type.

    The exporter keeps what it has received until `close`.
    """

    def __init__(
        self,
        make: Callable[[MetricsSettings, Callable[[ev.Event], None]], Exporter],
        **settings: Any,
    ) -> None:
        self.settings = MetricsSettings(**settings)
        self.clock = VirtualClock()
        self.events: list[ev.Event] = []
        self.exporter = make(self.settings, self.events.append)
        self.feed = MetricsFeed([self.exporter], self.settings, self.clock, self.events.append)

    def feed_samples(self) -> None:
        for event in SAMPLES:
            self.feed(event)
