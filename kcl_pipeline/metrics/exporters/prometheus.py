"""Serve metrics to Prometheus over HTTP (extra `prometheus`).

Every series has the labels `application` and `worker`. Histograms have no label of the shard: each
would have a dozen series per shard.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kcl_pipeline.config.metrics import MetricsSettings
from kcl_pipeline.events import EventSink, MetricsEndpointOpened
from kcl_pipeline.extras import require
from kcl_pipeline.metrics.exporters.exporter import Exporter, IsGone
from kcl_pipeline.metrics.instruments import (
    INSTRUMENTS,
    OPERATION,
    SHARD,
    WORKER,
    Attributes,
    Instrument,
    Kind,
    MetricValue,
    prometheus_label,
    prometheus_name,
)

BUCKETS_MILLIS: Final = (
    *(1, 2.5, 5, 10, 25, 50, 100, 250, 500),
    *(1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000),
)
_METHODS: Final = {Kind.COUNTER: "inc", Kind.GAUGE: "set", Kind.HISTOGRAM: "observe"}
COMMON_LABELS: Final = ("application", "worker", "operation")


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one name. Instruments of several operations may share it.

    Attributes:
        name: Name in Prometheus.
        kind: Type.
        description: Help text.
        dimensions: Dimensions that are labels, besides the common ones.
    """

    name: str
    kind: Kind
    description: str
    dimensions: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        return (*COMMON_LABELS, *(prometheus_label(name) for name in self.dimensions))


def families(instruments: Iterable[Instrument] = INSTRUMENTS) -> dict[str, Family]:
    """Return the families of the registry by name."""
    found: dict[str, Family] = {}
    for one in instruments:
        name, kind = prometheus_name(one), one.prometheus_kind
        omitted = {WORKER, SHARD} if kind is Kind.HISTOGRAM else {WORKER}
        added = [dimension for dimension in one.dimensions if dimension not in omitted]
        known = found.get(name, Family(name, kind, f"{one.name} of KCL", ()))
        dimensions = tuple(dict.fromkeys((*known.dimensions, *added)))
        text = f"{one.operation}: {one.description}"
        if known.dimensions or name in found:
            text = f"{known.description}; {text}"
        found[name] = Family(name, kind, text, dimensions)
    return found


class PrometheusExporter(Exporter):
    """Keeps the series of one application in this process, and serves them.

    Args:
        application: Label of every series.
        worker: Label of every series: worker id, or owner name of the leader.
        settings: Address and ports.
        events: Receives the address.

    Raises:
        SettingsError: prometheus_client is not installed.
        OSError: No port is free, or the address is not of this host.
    """

    name = "prometheus"

    def __init__(
        self, application: str, worker: str, settings: MetricsSettings, events: EventSink
    ) -> None:
        require(
            "prometheus",
            "metrics.metrics_backends with 'prometheus'",
            "remove 'prometheus' from the setting",
        )
        self._common = {"application": application, "worker": worker}
        self._lock = threading.Lock()
        self._library = importlib.import_module("prometheus_client")
        self._families = families()
        self._metrics: dict[str, Any] = {}
        self._series: dict[tuple[Instrument, Attributes], Callable[[float], None]] = {}
        registry = self._library.CollectorRegistry()
        registry.register(self)
        self._server, self._thread, address = _serve(self._library, registry, settings)
        self.address = address
        events(MetricsEndpointOpened(self.name, address))

    def collect(self) -> Iterator[Any]:
        """Return the series. The library calls it for each scrape."""
        with self._lock:
            metrics = list(self._metrics.values())
        for metric in metrics:
            for family in metric.collect():
                # The times of creation would double the number of counters.
                family.samples = [
                    sample for sample in family.samples if not sample.name.endswith("_created")
                ]
                yield family

    def record(self, values: Sequence[MetricValue]) -> None:
        """Record values. Of several gauges of one series, the largest counts."""
        gauges: dict[Callable[[float], None], float] = {}
        known = self._series
        for instrument, value, attributes in values:
            key = (instrument, attributes)
            put = known.get(key) or self._make_series(key)
            if instrument.prometheus_kind is Kind.GAUGE:
                gauges[put] = max(value, gauges.get(put, value))
            else:
                put(value)
        for put, value in gauges.items():
            put(value)

    def forget(self, is_gone: IsGone) -> None:
        """Remove the series that are gone. A histogram counts several shards, and is kept."""
        with self._lock:
            gone = [key for key in self._series if is_gone(*key)]
            for key in gone:
                instrument, attributes = key
                del self._series[key]
                family = self._families[prometheus_name(instrument)]
                if family.kind is not Kind.HISTOGRAM:
                    labels = self._labels(family, instrument, dict(attributes))
                    self._metrics[family.name].remove(*labels.values())

    def close(self, seconds: float) -> None:
        """Close the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(seconds)

    def _make_series(self, key: tuple[Instrument, Attributes]) -> Callable[[float], None]:
        instrument, attributes = key
        with self._lock:
            family = self._families[prometheus_name(instrument)]
            if family.name not in self._metrics:
                self._metrics[family.name] = self._make(family)
            labels = self._labels(family, instrument, dict(attributes))
            child = self._metrics[family.name].labels(**labels)
            put: Callable[[float], None] = getattr(child, _METHODS[family.kind])
            self._series[key] = put
            return put

    def _labels(self, family: Family, instrument: Instrument, attributes: Any) -> dict[str, str]:
        own = {prometheus_label(name): attributes.get(name, "") for name in family.dimensions}
        return {**self._common, prometheus_label(OPERATION): instrument.operation, **own}

    def _make(self, family: Family) -> Any:
        given: dict[str, Any] = {"labelnames": family.labels, "registry": None}
        if family.kind is Kind.HISTOGRAM:
            given["buckets"] = BUCKETS_MILLIS
        make = getattr(self._library, family.kind.value.capitalize())
        return make(family.name, family.description, **given)


def _serve(library: Any, registry: Any, settings: MetricsSettings) -> tuple[Any, Any, str]:
    """Serve at the first free port; return the server, its thread and the address."""
    host, first = settings.prometheus_address, settings.prometheus_port
    last = first if first == 0 else min(first + settings.prometheus_port_count - 1, 65_535)
    for port in range(first, last + 1):
        try:
            server, thread = library.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            if port < last:
                continue
            raise OSError(
                f"no port from {first} to {last} of {host} can be opened ({error}). Write another "
                "metrics.prometheus_port, or a larger metrics.prometheus_port_count"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        return server, thread, f"http://{shown}:{server.server_port}/metrics"
    raise AssertionError(port)
