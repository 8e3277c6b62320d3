"""Export metrics to OpenTelemetry.

Only its API is used. The application configures the SDK and its exporters. Names, instruments and
attributes are those of the Java KCL's OpenTelemetry backend (protocol §12.3). Values are recorded
at once.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from kcl_pipeline.extras import require
from kcl_pipeline.metrics.exporters.exporter import Exporter
from kcl_pipeline.metrics.instruments import (
    OPERATION,
    Attributes,
    Instrument,
    Kind,
    MetricValue,
    otel_attributes,
    otel_name,
)
from kcl_pipeline.version import __version__

SCOPE: Final = "software.amazon.kinesis"
_METHODS: Final = {Kind.COUNTER: "add", Kind.GAUGE: "set", Kind.HISTOGRAM: "record"}


class OtelExporter(Exporter):
    """Records values in the instruments of a meter.

    The SDK of the application keeps the series, and the application closes it.

    Args:
        meter: The meter. None: of the global provider.

    Raises:
        SettingsError: The OpenTelemetry API is not installed.
    """

    name = "otel"

    def __init__(self, meter: Any = None) -> None:
        self._meter = meter if meter is not None else _global_meter()
        self._instruments: dict[Instrument, Callable[[float, dict[str, str]], None]] = {}
        self._made: dict[tuple[str, Kind], Any] = {}

    def record(self, values: Sequence[MetricValue]) -> None:
        """Record values."""
        for one in values:
            put = self._instruments.get(one.instrument) or self._make(one.instrument)
            put(one.value, _attributes(one.instrument.operation, one.attributes))

    def _make(self, instrument: Instrument) -> Callable[[float, dict[str, str]], None]:
        key = (instrument.name, instrument.kind)
        if key not in self._made:
            make = getattr(self._meter, f"create_{instrument.kind}")
            self._made[key] = make(otel_name(instrument.name), unit=instrument.unit.value.ucum)
        put: Callable[[float, dict[str, str]], None] = getattr(
            self._made[key], _METHODS[instrument.kind]
        )
        self._instruments[instrument] = put
        return put


@lru_cache(maxsize=20_000)
def _attributes(operation: str, attributes: Attributes) -> dict[str, str]:
    return otel_attributes({OPERATION: operation, **dict(attributes)})


def _global_meter() -> Any:
    require("otel", "metrics.metrics_backends with 'otel'", "remove 'otel' from the setting")
    return importlib.import_module("opentelemetry.metrics").get_meter(SCOPE, __version__)
