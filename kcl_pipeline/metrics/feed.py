"""Feed exporters with the values of events, within the level and the dimensions of the settings.

The number of series is bounded. A shard appears as a dimension only at level DETAILED, and only
while this process measures its lag, so it holds its lease. Free texts have at most `MAX_TEXTS`
values, and shards and streams at most `MAX_SHARDS`. A stream that nobody names any more loses its
series, and makes room for another.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config.metrics import ALL_DIMENSIONS, MetricsSettings
from kcl_pipeline.events import CycleFinished, Event, EventSink, MetricsExportFailed, StatusMeasured
from kcl_pipeline.metrics.exporters.exporter import CLOSE_SECONDS, Exporter, IsGone
from kcl_pipeline.metrics.instruments import (
    CALL,
    INSTRUMENTS,
    MILLIS_BEHIND_LATEST,
    SHARD,
    STREAM,
    WORKER,
    Attributes,
    HeldLeaseCount,
    Instrument,
    Kind,
    Level,
    MetricValue,
    dimensions_of,
    observations,
)

MAX_SHARDS: Final = 1_000
"""Number of shards, and of streams, that have series of their own in one process."""
MAX_TEXTS: Final = 50
OTHER: Final = "other"
"""Value of a dimension for all values above the bound."""
MAX_RESOLVED: Final = 50_000
"""Number of remembered results. They are computed again afterwards."""
_UNKNOWN: Final[Any] = object()
FORGET_SECONDS: Final = 300.0
"""The series of a shard are removed when its lag was not measured for this time."""
FORGET_STREAM_SECONDS: Final = 3_600.0
"""The series of a stream are removed when no event names it for this time.

Longer than the time of a shard: the leader counts what it does for a stream, and does it seldom.
"""


class Dimensions:
    """Remove metrics and dimensions that the settings do not want, and bound the number of values.

    Thread-safe.
    """

    def __init__(self, settings: MetricsSettings, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: dict[Attributes, float] = {}
        self._streams: dict[str, float] = {}
        self._calls: set[str] = set()
        self._kept: dict[Instrument, frozenset[str]] = {
            one: frozenset(one.dimensions) - _removed(settings)
            for one in INSTRUMENTS
            if settings.metrics_level == "DETAILED"
            or (settings.metrics_level == "SUMMARY" and one.level is Level.SUMMARY)
        }
        self._resolved: dict[tuple[Instrument, Attributes], Attributes | None] = {}

    def applied(self, values: Iterable[MetricValue]) -> list[MetricValue]:
        """Return the values that the settings want, with their dimensions."""
        found = []
        for one in values:
            instrument, value, attributes = one
            key = (instrument, attributes)
            resolved = self._resolved.get(key, _UNKNOWN)
            if resolved is _UNKNOWN:
                resolved = self._resolve(key)
            if resolved is not None:
                found.append(MetricValue(instrument, value, resolved))
        return found

    def _resolve(self, key: tuple[Instrument, Attributes]) -> Attributes | None:
        instrument, given = key
        kept = self._kept.get(instrument)
        with self._lock:
            resolved: Attributes | None = None
            if kept is not None:
                bounded = ((name, self._bounded(name, value)) for name, value in given)
                resolved = tuple(pair for pair in bounded if pair[0] in kept)
                shard = _shard(resolved)
                if shard and not self._is_known(shard):
                    resolved = tuple(
                        (name, OTHER if name == SHARD else value) for name, value in resolved
                    )
            if len(self._resolved) >= MAX_RESOLVED:
                self._resolved.clear()
            self._resolved[key] = resolved
        return resolved

    def measured(self, lease_keys: Iterable[str]) -> IsGone | None:
        """Note the shards whose lag was measured; return which series are gone. None: no series.

        The lag of a shard that was not measured is gone at once, everything else of it later.
        """
        now = self._clock.monotonic()
        found = {dimensions_of(key) for key in lease_keys}
        with self._lock:
            for shard in found:
                self._streams |= {value: now for name, value in shard if name == STREAM}
            absent = self._shards.keys() - found
            for shard in found & self._shards.keys():
                self._shards[shard] = now
            old = {shard for shard in absent if now - self._shards[shard] >= FORGET_SECONDS}
            for shard in old:
                del self._shards[shard]
            if old:
                self._resolved.clear()
        if not absent:
            return None

        def is_gone(instrument: Instrument, attributes: Attributes) -> bool:
            return _shard(attributes) in (absent if instrument is MILLIS_BEHIND_LATEST else old)

        return is_gone

    def note_stream(self, stream: str) -> None:
        """Note that an event names a stream."""
        with self._lock:
            if stream in self._streams:
                self._streams[stream] = self._clock.monotonic()

    def gone_streams(self) -> IsGone | None:
        """Forget the streams that nobody names any more. None: there is none."""
        now = self._clock.monotonic()
        with self._lock:
            old = {
                stream
                for stream, named_at in self._streams.items()
                if now - named_at >= FORGET_STREAM_SECONDS
            }
            if not old:
                return None
            for stream in old:
                del self._streams[stream]
            self._resolved.clear()

        def is_gone(instrument: Instrument, attributes: Attributes) -> bool:
            del instrument
            return any(name == STREAM and value in old for name, value in attributes)

        return is_gone

    def _bounded(self, name: str, value: str) -> str:
        if name == STREAM:
            if value not in self._streams:
                if len(self._streams) >= MAX_SHARDS:
                    return OTHER
                self._streams[value] = self._clock.monotonic()
        elif name == CALL and value not in self._calls:
            if len(self._calls) >= MAX_TEXTS:
                return OTHER
            self._calls.add(value)
        return value

    def _is_known(self, shard: Attributes) -> bool:
        if shard not in self._shards:
            if len(self._shards) >= MAX_SHARDS:
                return False
            self._shards[shard] = self._clock.monotonic()
        return True


def _shard(attributes: Attributes) -> Attributes:
    """The dimensions of the shard; empty if no shard is named."""
    if not any(name == SHARD for name, _ in attributes):
        return ()
    return tuple(pair for pair in attributes if pair[0] in (SHARD, STREAM))


def _removed(settings: MetricsSettings) -> frozenset[str]:
    enabled = settings.metrics_enabled_dimensions
    removed = (
        set[str]()
        if ALL_DIMENSIONS in enabled
        else {name for name in (SHARD, STREAM, WORKER) if name not in enabled}
    )
    if settings.metrics_level != "DETAILED":
        removed.add(SHARD)
    return frozenset(removed)


def _is_gauge_of_leader(instrument: Instrument, attributes: Attributes) -> bool:
    # A process that does not lead any more would show its last values for ever.
    del attributes
    return instrument.kind is Kind.GAUGE and instrument.events.keys() == {CycleFinished}


class MetricsFeed:
    """An event sink that feeds exporters.

    An exporter that raises is reported once, and does not affect the others.

    Args:
        exporters: The exporters.
        settings: Level and dimensions.
        clock: The clock.
        events: Receives errors of the exporters.
    """

    def __init__(
        self,
        exporters: Sequence[Exporter],
        settings: MetricsSettings,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._exporters = tuple(exporters)
        self._dimensions = Dimensions(settings, clock)
        self._events = events
        self._held = HeldLeaseCount()
        self._failed: set[str] = set()
        self._led = False

    def __call__(self, event: Event) -> None:
        """Record the values of one event."""
        stream = getattr(event, "stream", None)
        if isinstance(stream, str):
            self._dimensions.note_stream(stream)
        found = (*observations(event), *self._held.after(event))
        values = self._dimensions.applied(found) if found else []
        if values:
            for exporter in self._exporters:
                self._try(exporter, lambda target: target.record(values))
        if isinstance(event, StatusMeasured):
            self._forget(self._dimensions.measured(lag.lease_key for lag in event.status.lags))
        if isinstance(event, StatusMeasured | CycleFinished):
            self._forget(self._dimensions.gone_streams())
        if isinstance(event, CycleFinished):
            if self._led and not event.led:
                self._forget(_is_gauge_of_leader)
            self._led = event.led

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Export what is left, within about this time per exporter."""
        for exporter in self._exporters:
            self._try(exporter, lambda target: target.close(seconds))

    def _forget(self, is_gone: IsGone | None) -> None:
        if is_gone is None:
            return
        for exporter in self._exporters:
            self._try(exporter, lambda target: target.forget(is_gone))

    def _try(self, exporter: Exporter, call: Callable[[Exporter], None]) -> None:
        try:
            call(exporter)
        except Exception as error:  # noqa: BLE001 (metrics must not stop a worker)
            if exporter.name not in self._failed:
                self._failed.add(exporter.name)
                text = f"{type(error).__name__}: {error}"
                self._events(MetricsExportFailed(exporter.name, text))
