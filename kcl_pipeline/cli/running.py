"""What the commands that run a worker share: the pipeline, its session, and lines of progress."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import load_named, load_pipeline
from kcl_pipeline.control.context import OperationContext
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.metrics.exporters import LoggingEvents
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.spark.java import require_java, require_user_name
from kcl_pipeline.text import counted
from kcl_pipeline.worker_status import WorkerStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kcl_pipeline.pipeline import KinesisPipeline


def show_log() -> None:
    """Print the log to standard error."""
    # Level INFO also shows what the worker does: leases gained and handed off, leadership, ends
    # of shards.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("kcl_pipeline").setLevel(logging.INFO)


def session(pipeline: KinesisPipeline) -> SparkSession:
    """Create the Spark session of a pipeline."""
    from kcl_pipeline.spark.session import build_session  # noqa: PLC0415 (it needs pyspark)

    return build_session(pipeline.name, pipeline.spark_config)


def runnable(application: str | None, pipeline: str | None) -> KinesisPipeline:
    """The pipeline that the option names; Java is there if it needs a Spark session.

    Raises:
        SettingsError: The options name no pipeline, or no usable Java was found.
    """
    from kcl_pipeline.pipeline import KinesisPipeline  # noqa: PLC0415 (loaded only here)

    if application is not None or pipeline is None:
        raise SettingsError(
            "the command runs the code of a pipeline; write --pipeline module:attribute, without "
            "--application"
        )
    found = load_pipeline(pipeline)
    if not isinstance(found, KinesisPipeline):
        raise SettingsError(
            f"--pipeline {pipeline} is a {type(found).__name__}; name a KinesisPipeline"
        )
    if found.transform is not None:
        require_java()
        require_user_name()
    return found


def processor_pipeline(
    application: str | None,
    streams: list[str] | None,
    processor: str | None,
    properties: Path | None,
) -> tuple[KinesisPipeline, str | None]:
    """The pipeline of a record processor, and the name of its worker in the properties file.

    Raises:
        SettingsError: The options contradict each other, or something is missing.
    """
    from kcl_pipeline.pipeline import KinesisPipeline  # noqa: PLC0415 (loaded only here)
    from kcl_pipeline.processors.kclpy.kcl import script_processor  # noqa: PLC0415 (likewise)
    from kcl_pipeline.processors.properties import read_properties  # noqa: PLC0415 (likewise)

    overrides: Mapping[str, Any] = {}
    script: Path | None = None
    worker_id: str | None = None
    if properties is not None:
        if application is not None or streams:
            raise SettingsError(
                f"--properties {properties} names application and stream; remove --application "
                "and --stream"
            )
        given = read_properties(properties)
        application, streams, overrides = given.name, [given.stream], given.overrides
        script, worker_id = given.script, given.worker_id
        if given.region is not None and not os.environ.get("AWS_DEFAULT_REGION"):
            os.environ.setdefault("AWS_REGION", given.region)
        for note in given.notes:
            logging.getLogger(__name__).warning("%s: %s", properties, note)
    if application is None or not streams:
        missing = "--application NAME" if application is None else "--stream NAME"
        raise SettingsError(f"--processor {processor} needs {missing}; write it, too")
    if processor is not None and ":" not in processor:
        script, processor = Path(processor), None
    if processor is None and script is None:
        raise SettingsError(
            f"--properties {properties} has no executableName; write --processor module:class"
        )
    made: Any = (
        script_processor(script)
        if processor is None and script is not None
        else load_named("--processor", str(processor))
    )
    pipeline = KinesisPipeline(
        application, streams, processor=made, settings_overrides=dict(overrides)
    )
    return pipeline, worker_id


@contextmanager
def replaying(context: OperationContext) -> Iterator[OperationContext]:
    """Give a replay its log, its Spark session, and the signals that end it."""
    show_log()
    pipeline, stop = context.pipeline, context.control.clock.signal()
    if pipeline.transform is not None:
        require_java()
        require_user_name()
    with stop_on_signals(stop) as signals:
        yield replace(
            context,
            stop=stop,
            session_factory=signals.reinstalled_after(lambda: session(pipeline)),
            events=LoggingEvents(),
            on_progress=lambda progress: show.echo(progress_line(progress), err=True),
        )


def progress_line(progress: WorkerStatus) -> str:
    """The counters of a period in one line, with the lag of committed data."""
    lag = "unknown" if progress.lag_millis is None else f"{progress.lag_millis} ms"
    unknown, done = progress.unknown_lags, progress.totals
    parts = [
        f"{done.records:,} records, {done.bytes / 1e6:,.1f} MB in {done.seconds:.0f} s",
        f"lag {lag}" + (f" ({counted(unknown, 'shard')} not read yet)" if unknown else ""),
        counted(len(progress.positions), "lease"),
    ]
    parts += [f"{len(progress.stalled)} stalled"] if progress.stalled else []
    parts += [f"{len(progress.paused)} paused"] if progress.paused else []
    return "; ".join(parts)
