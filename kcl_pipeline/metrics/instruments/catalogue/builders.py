"""Short forms of the constructor of `Instrument`."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.events import Event
from kcl_pipeline.metrics.instruments.instrument import (
    SHARD,
    STREAM,
    WORKER,
    Instrument,
    Kind,
    Level,
    Unit,
)

SUMMARY: Final = Level.SUMMARY
DETAILED: Final = Level.DETAILED
OF_LEASE: Final = (SHARD, STREAM)
OF_WORKER: Final = (WORKER,)


def counter(
    name: str,
    operation: str,
    level: Level,
    description: str,
    *events: type[Event],
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
        events,
        description,
        dimensions,
        in_kcl,
        prometheus,
    )


def gauge(
    name: str,
    operation: str,
    description: str,
    *events: type[Event],
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
        events,
        description,
        dimensions,
        in_kcl,
    )


def histogram(
    name: str,
    operation: str,
    level: Level,
    description: str,
    *events: type[Event],
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
        events,
        description,
        dimensions,
        in_kcl,
        prometheus,
    )
