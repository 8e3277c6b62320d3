"""Short forms of the constructor of `Instrument`."""

from typing import Final

from kcl_pipeline.metrics.instruments.instrument import (
    SHARD,
    STREAM,
    WORKER,
    FedBy,
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
