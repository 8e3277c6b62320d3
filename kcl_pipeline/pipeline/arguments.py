"""Check the arguments of a pipeline before any I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from kcl_pipeline.arguments import (
    check_flag,
    check_function,
    check_number,
    check_options,
    check_text,
    check_texts,
    checked_arguments,
)
from kcl_pipeline.aws import AwsClients
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.config.model import STREAM_FORMS
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachArrowSink, ForeachBatchSink
from kcl_pipeline.leader.streams import SelectStreams
from kcl_pipeline.planning import strategies
from kcl_pipeline.processors import ProcessorSink
from kcl_pipeline.settings_errors import nearest, refuse_settings, shown, unknown, wrong
from kcl_pipeline.stream_config import StreamConfig, StreamForms, StreamSelector, stream_settings

_OWN_ARGUMENTS: Final = {
    "application_name": "name",
    "streams": "streams",
    "stream_settings": "streams",
    "selects_streams": "streams",
}
_OWN_TAG: Final = re.compile(
    r"\.?kcl/.*|\.dagster/.*"
    r"|dagster/(max_retries|max_runtime|max_runtime_seconds|run_key|sensor_name)"
)
"""Tags of runs that this package or Dagster sets, or that would override one of them."""
INVALID_IN_KEY: Final = re.compile(r"[^A-Za-z0-9_.-]")
"""What Dagster does not allow in a part of an asset key."""
_TAG: Final = re.compile(r"([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}")
_SINKS: Final = (
    "DeltaSink('s3://lake/orders'), a ForeachArrowSink or a ForeachBatchSink; or "
    "processor=MyProcessor"
)


@checked_arguments
@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers the sensor keeps running.

    Example:
        >>> from kcl_pipeline import Fleet
        >>> fleet = Fleet(min=2, max=8, run_tags={"team": "orders"})

    Raises:
        SettingsError: Not 1 ≤ min ≤ max, or a run tag is wrong.
    """

    min: int = 1
    """Smallest number, 1 or more."""
    max: int = 8
    """Largest number, `min` or more."""
    run_tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the runs that the sensor starts, such as `dagster-k8s/config` as JSON.

    They are visible in the Dagster UI, so write no secrets.
    """
    max_starting: int = 4
    """How many runs may be queued or starting at once, 1 or more."""
    run_hours: float | None = 6.0
    """How long a worker runs. Then another one takes its leases, and it ends.

    None: without an end, as for workers under another supervisor.
    """
    rolling_replacement: bool = True
    """Whether the sensor replaces the workers one by one after the version of the code changed."""
    code_version: str | None = None
    """Version of your code. None: the Git commit or the image of the code location, if known."""

    def __post_init__(self) -> None:
        for name, unit in (("min", "workers"), ("max", "workers"), ("max_starting", "runs")):
            value = getattr(self, name)
            check_number(f"Fleet {name}", value, f"a number of {unit}", least=1, whole=True)
        if self.max < self.min:
            raise SettingsError(
                f"Fleet max={self.max} is less than min={self.min}. Write max={self.min} or more."
            )
        check_run_tags(self.run_tags)
        check_number(
            "Fleet run_hours",
            self.run_hours,
            "a time in hours",
            least=0.001,
            most=8_760,
            optional=True,
        )
        check_flag("Fleet rolling_replacement", self.rolling_replacement)
        check_text(
            "Fleet code_version",
            self.code_version,
            "Write the version of your code, such as a Git commit, or None",
            optional=True,
        )


def check_run_tags(tags: object) -> None:
    """Raise `SettingsError` unless these are tags that a user may give to the runs of workers."""
    check_options("Fleet run_tags", tags, "{'team': 'orders'}")
    for key in tags if isinstance(tags, Mapping) else ():
        name = f"Fleet run_tags[{key!r}]"
        if _OWN_TAG.fullmatch(key):
            raise SettingsError(f"{name} is a tag of kcl_pipeline or Dagster. Leave it out.")
        if not _TAG.fullmatch(key):
            raise SettingsError(
                f"{name} is not the key of a tag. Write 1 to 63 of the characters A-Z a-z 0-9 _ . "
                "-, and before it a namespace and a slash if you want one, such as 'shop/team'."
            )


def output_path(given: object) -> list[str] | None:
    """Return the parts of the asset key that a user gave for the output. None: there is none.

    Raises:
        SettingsError: It is not a key, or Dagster does not allow its characters.
    """
    if given is None:
        return None
    parts: Any = getattr(given, "path", given)  # an AssetKey; Dagster is not loaded here
    if isinstance(parts, str):
        parts = parts.split("/")
    advice = "Write ['lake', 'orders'], 'lake/orders' or an AssetKey"
    check_texts("output_asset_key", parts, advice)
    if not parts or any(INVALID_IN_KEY.search(part) for part in parts):
        raise wrong(
            "output_asset_key",
            "/".join(parts),
            "is not an asset key of the characters A-Z a-z 0-9 _ . -",
            advice,
        )
    return [*parts]


def check_arguments(
    name: object,
    streams: object,
    sink: object,
    transform: object,
    transform_arrow: object,
    workers: object,
    spark_config: object,
) -> None:
    """Raise `SettingsError` if an argument other than the settings is wrong."""
    check_text("name", name, "Write the name of the application, such as 'orders'")
    _check_streams(streams)
    _check_sink(sink)
    _check_transforms(transform, transform_arrow, sink)
    _check_workers(workers)
    check_options("spark_config", spark_config, "{'spark.executor.memory': '4g'}", hidden=True)


def checked_settings(name: str, streams: StreamForms, overrides: object) -> ConsumerSettings:
    """Return the validated settings of an application, or raise `SettingsError`."""
    if not isinstance(overrides, Mapping):
        raise wrong(
            "settings_overrides",
            overrides,
            "is not a dictionary",
            "Write settings_overrides={'lease': {'failover_time_millis': 5000}}",
        )
    for own, argument in _OWN_ARGUMENTS.items():
        if own in overrides:
            raise SettingsError(
                f"settings_overrides[{own!r}] is set by the argument {argument}. "
                f"Write {argument}=... instead."
            )
    try:
        settings = ConsumerSettings.model_validate(
            {**overrides, "application_name": name, **stream_settings(streams)}
        )
    except ValidationError as error:
        refuse_settings(error, ConsumerSettings, _OWN_ARGUMENTS)
    _check_strategy(settings.assignment.lease_assignment_strategy)
    return settings


def select_function(
    streams: StreamForms, clients: AwsClients, clock: Clock
) -> SelectStreams | None:
    """Return the function that selects the streams. None: the settings name them."""
    if isinstance(streams, StreamSelector):
        from kcl_pipeline.kinesis.selection import StreamFinder  # noqa: PLC0415 (AWS only here)

        return StreamFinder(clients.kinesis, clock, streams.prefix, streams.tags).find
    return streams if callable(streams) else None


def _check_strategy(name: str) -> None:
    try:
        strategies.get(name)
    except SettingsError:
        setting, known = "assignment.lease_assignment_strategy", strategies.names()
        close = nearest(name, known)
        if close is not None:
            raise SettingsError(
                f"{setting}={name!r} is not known. Did you mean {close!r}?"
            ) from None
        raise SettingsError(
            f"{setting}: {unknown(repr(name), known, 'a strategy')} Register your own strategy "
            "before you create the pipeline."
        ) from None


def _check_streams(streams: object) -> None:
    if isinstance(streams, str):
        raise wrong("streams", streams, "is a string", f"Write streams=[{shown(streams)}]")
    if isinstance(streams, StreamConfig):
        raise wrong("streams", streams, "is one stream", "Write streams=[StreamConfig(...)]")
    if isinstance(streams, StreamSelector):
        return
    if callable(streams):
        check_function("streams", streams, [], "a list, or a function that returns one")
        return
    if not isinstance(streams, Sequence) or isinstance(streams, bytes | bytearray):
        raise wrong(
            "streams",
            streams,
            "is not a list",
            f"Write a list with {STREAM_FORMS}, such as streams=['orders']",
        )


def _check_workers(workers: object) -> None:
    if not isinstance(workers, Fleet):
        most = workers if isinstance(workers, int) and workers > 0 else 8
        raise wrong(
            "workers", workers, "is not a Fleet", f"Write workers=Fleet(min=1, max={most:d})"
        )


def _check_sink(sink: object) -> None:
    if isinstance(sink, DeltaSink | ForeachArrowSink | ForeachBatchSink | ProcessorSink):
        return
    if isinstance(sink, str):
        raise wrong("sink", sink, "is a string", f"Write sink=DeltaSink({shown(sink)})")
    if isinstance(sink, type) or callable(sink):
        raise wrong(
            "sink",
            sink,
            "is a class or function",
            "Write sink=ForeachArrowSink(function) or sink=DeltaSink('s3://lake/orders')",
        )
    raise wrong("sink", sink, "is not a sink", f"Write sink={_SINKS}")


def _check_transforms(frames: object, tables: object, sink: object) -> None:
    if frames is not None:
        check_function("transform", frames, ["records"], "a function of a Spark DataFrame")
    if tables is not None:
        check_function("transform_arrow", tables, ["records"], "a function of a pyarrow.Table")
    if frames is not None and tables is not None:
        raise SettingsError("transform and transform_arrow are both set. Write one of them.")
    if isinstance(sink, ProcessorSink) and (frames is not None or tables is not None):
        raise SettingsError(
            "a transform does not work with a processor, which gets the records. Omit it."
        )
    if tables is not None and isinstance(sink, ForeachBatchSink):
        raise SettingsError(
            "transform_arrow does not work with a ForeachBatchSink, which gets a Spark DataFrame. "
            "Write transform=..., or sink=ForeachArrowSink(function)."
        )
    if frames is not None and isinstance(sink, ForeachArrowSink):
        raise SettingsError(
            "transform does not work with a ForeachArrowSink, which gets a pyarrow.Table. Write "
            "transform_arrow=..., or sink=ForeachBatchSink(function)."
        )
