"""Open the exporters that the settings name, and connect them with the events of a process."""

import atexit
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import Event, EventSink, MetricsExportFailed, WorkerStarted, WorkerStopped
from kcl_pipeline.extras import MODULES, require
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.metrics.exporters import fan_out
from kcl_pipeline.metrics.exporters.exporter import Exporter
from kcl_pipeline.metrics.feed import MetricsFeed
from kcl_pipeline.metrics.loss_recorder import LossRecorder, recording_losses

_leaders: Final[dict[tuple[str, str, str], MetricsFeed]] = {}
_leaders_lock: Final = threading.Lock()


class HasCloudWatch(Protocol):
    """The boto3 clients of an application."""

    @property
    def cloudwatch(self) -> Any:
        """The CloudWatch client, created on first use."""


class WorkerMetricsExport:
    """An event sink that exports metrics from the start of a worker to its end.

    The exporters are opened when the worker has started, and closed when it has stopped. So a
    worker that cannot start leaves no port and no thread.

    Args:
        worker_id: The worker.
        open_feed: Opens the exporters.
    """

    def __init__(self, worker_id: str, open_feed: Callable[[], MetricsFeed]) -> None:
        self._worker_id = worker_id
        self._open_feed = open_feed
        self._feed: MetricsFeed | None = None

    def __call__(self, event: Event) -> None:
        """Pass the event to the exporters."""
        if isinstance(event, WorkerStarted) and event.worker_id == self._worker_id:
            self._feed = self._open_feed()
        feed = self._feed
        if feed is None:
            return
        feed(event)
        if isinstance(event, WorkerStopped) and event.worker_id == self._worker_id:
            self._feed = None
            feed.close()


def observed_worker(
    events: EventSink,
    losses: CoordinatorStateTable,
    settings: ConsumerSettings,
    clock: Clock,
    worker_id: str,
    clients: HasCloudWatch,
) -> EventSink:
    """Return a sink for the events of a worker: losses are recorded, and metrics exported.

    Raises:
        SettingsError: An extra of an exporter is missing.
    """
    if is_exported(settings):
        require_exporters(settings)
        given = events
        metrics = WorkerMetricsExport(
            worker_id, lambda: open_feed(settings, clock, given, worker_id, clients)
        )
        events = fan_out(events, metrics)
    return recording_losses(events, losses, clock)


def observed_leader(
    events: EventSink,
    losses: CoordinatorStateTable,
    settings: ConsumerSettings,
    clock: Clock,
    owner_name: str,
    clients: HasCloudWatch,
) -> EventSink:
    """Return a sink for the events of a leader: losses are recorded, and metrics exported.

    The exporters last as long as the process, and further leaders of this name use them. A sink
    that observes already is returned as it is: the leader is part of a worker.

    Raises:
        SettingsError: An extra of an exporter is missing.
    """
    if is_exported(settings) and not isinstance(events, LossRecorder):
        require_exporters(settings)
        key = (settings.application_name, owner_name, settings.metrics.model_dump_json())
        with _leaders_lock:
            if key not in _leaders:
                _leaders[key] = open_feed(settings, clock, events, owner_name, clients)
                atexit.register(_leaders[key].close)
        events = fan_out(events, _leaders[key])
    return recording_losses(events, losses, clock)


def is_exported(settings: ConsumerSettings) -> bool:
    """Return whether the settings name an exporter."""
    return bool(settings.metrics.metrics_backends) and settings.metrics.metrics_level != "NONE"


def require_exporters(settings: ConsumerSettings) -> None:
    """Check that the extras of the exporters are installed.

    Raises:
        SettingsError: One is missing.
    """
    for backend in settings.metrics.metrics_backends:
        if backend in MODULES:
            feature = f"metrics.metrics_backends with {backend!r}"
            require(backend, feature, f"remove {backend!r} from the setting")


def open_feed(
    settings: ConsumerSettings, clock: Clock, events: EventSink, name: str, clients: HasCloudWatch
) -> MetricsFeed:
    """Open the exporters. One that cannot start is reported as an event.

    Args:
        settings: All settings.
        clock: The clock.
        events: Receives the events of the exporters.
        name: Worker id, or owner name of the leader.
        clients: The boto3 clients.
    """
    exporters: list[Exporter] = []
    for backend in dict.fromkeys(settings.metrics.metrics_backends):
        try:
            exporters.append(_open(backend, settings, clock, events, name, clients))
        except Exception as error:  # noqa: BLE001 (the worker continues without this exporter)
            events(MetricsExportFailed(backend, f"{type(error).__name__}: {error}"))
    return MetricsFeed(exporters, settings.metrics, clock, events)


def _open(
    backend: str,
    settings: ConsumerSettings,
    clock: Clock,
    events: EventSink,
    name: str,
    clients: HasCloudWatch,
) -> Exporter:
    # Each library is loaded only if its exporter is used.
    from kcl_pipeline.metrics.exporters.cloudwatch import CloudWatchExporter  # noqa: PLC0415
    from kcl_pipeline.metrics.exporters.otel import OtelExporter  # noqa: PLC0415
    from kcl_pipeline.metrics.exporters.prometheus import PrometheusExporter  # noqa: PLC0415

    if backend == "otel":
        return OtelExporter()
    if backend == "prometheus":
        return PrometheusExporter(settings.application_name, name, settings.metrics, events)
    namespace = settings.metrics.namespace or settings.application_name
    return CloudWatchExporter(
        lambda: clients.cloudwatch, namespace, settings.metrics, clock, events
    )
