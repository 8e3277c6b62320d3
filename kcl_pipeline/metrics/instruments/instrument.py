"""What a metric is: the types of the registry, and short forms of their constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple

from kcl_pipeline.events import Event

OPERATION: Final = "Operation"
WORKER: Final = "WorkerIdentifier"
SHARD: Final = "ShardId"
STREAM: Final = "StreamId"
REASON: Final = "Reason"
STEP: Final = "Step"
FORCED: Final = "Forced"
CALL: Final = "Call"


Attributes = tuple[tuple[str, str], ...]
"""Names and values of dimensions. A tuple, because a series is found by it."""


Measure = Callable[[Any], float | Mapping[str, float] | None]
"""The value of an event; or its values by lease key. None: it has none."""

FedBy = type[Event] | Mapping[type[Event], Measure]


class Kind(StrEnum):
    """Type of a metric: counters add up, gauges replace, histograms are distributions."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Level(StrEnum):
    """The least detailed `metrics_level` that emits a metric."""

    SUMMARY = "SUMMARY"
    DETAILED = "DETAILED"


class _Names(NamedTuple):
    ucum: str
    cloudwatch: str
    suffix: str


class Unit(Enum):
    """Unit of a metric, with its names in OpenTelemetry, CloudWatch and Prometheus."""

    COUNT = _Names("1", "Count", "")
    MILLISECONDS = _Names("ms", "Milliseconds", "_milliseconds")
    BYTES = _Names("By", "Bytes", "_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One metric of one operation.

    Attributes:
        name: Name in KCL, or a name of the same form. Several operations may have it.
        operation: Value of the dimension `Operation`.
        kind: Type of the metric, as in KCL's OpenTelemetry backend.
        unit: Unit of the values.
        level: The least detailed level that emits it.
        fed_by: The events that feed it, and the value of each. A type: each event counts 1.
        description: What it counts or measures.
        dimensions: Dimensions other than `Operation` that a value may have.
        in_kcl: Whether the Java KCL has this metric.
        prometheus: Type in Prometheus, if it is not `kind`.
    """

    name: str
    operation: str
    kind: Kind
    unit: Unit
    level: Level
    fed_by: FedBy
    description: str
    dimensions: tuple[str, ...] = ()
    in_kcl: bool = True
    prometheus: Kind | None = None

    @property
    def events(self) -> Mapping[type[Event], Measure]:
        """Types of the events that feed it, and the value of each."""
        return {self.fed_by: _count_one} if isinstance(self.fed_by, type) else self.fed_by

    @property
    def prometheus_kind(self) -> Kind:
        """Type of the metric in Prometheus."""
        return self.prometheus or self.kind

    def of(self, value: float, attributes: Attributes = ()) -> MetricValue:
        """Return one value."""
        return MetricValue(self, value, attributes)


def _count_one(_: Event) -> int:
    return 1


class MetricValue(NamedTuple):
    """One value of a metric.

    Attributes:
        instrument: The metric.
        value: The value in the unit of the instrument.
        attributes: Dimensions other than `Operation`.
    """

    instrument: Instrument
    value: float
    attributes: Attributes = ()


SUMMARY: Final = Level.SUMMARY
DETAILED: Final = Level.DETAILED
OF_LEASE: Final = (SHARD, STREAM)
OF_WORKER: Final = (WORKER,)


def counter(
    name: str,
    operation: str,
    level: Level,
    description: str,
    fed_by: FedBy,
    *,
    dimensions: tuple[str, ...] = (),
    in_kcl: bool = True,
    prometheus: Kind | None = None,
) -> Instrument:
    """Return a counter."""
    return Instrument(
        name,
        operation,
        Kind.COUNTER,
        Unit.COUNT,
        level,
        fed_by,
        description,
        dimensions,
        in_kcl,
        prometheus,
    )


def gauge(
    name: str,
    operation: str,
    description: str,
    fed_by: FedBy,
    *,
    dimensions: tuple[str, ...] = (),
    unit: Unit = Unit.COUNT,
    in_kcl: bool = True,
) -> Instrument:
    """Return a gauge of level SUMMARY."""
    return Instrument(
        name,
        operation,
        Kind.GAUGE,
        unit,
        SUMMARY,
        fed_by,
        description,
        dimensions,
        in_kcl,
    )


def histogram(
    name: str,
    operation: str,
    level: Level,
    description: str,
    fed_by: FedBy,
    *,
    dimensions: tuple[str, ...] = (),
    unit: Unit = Unit.MILLISECONDS,
    in_kcl: bool = True,
    prometheus: Kind | None = None,
) -> Instrument:
    """Return a histogram."""
    return Instrument(
        name,
        operation,
        Kind.HISTOGRAM,
        unit,
        level,
        fed_by,
        description,
        dimensions,
        in_kcl,
        prometheus,
    )
