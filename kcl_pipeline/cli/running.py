"""What the commands that run a worker share: the pipeline, its session, and lines of progress."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kcl_pipeline.cli.target import load_pipeline
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.spark.java import require_java, require_user_name
from kcl_pipeline.text import counted
from kcl_pipeline.worker.summary import WorkerProgress

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


def progress_line(progress: WorkerProgress) -> str:
    """The counters of a period in one line, with the lag of committed data."""
    lag = "unknown" if progress.lag_millis is None else f"{progress.lag_millis} ms"
    unknown = len(progress.lag_unknown)
    parts = [
        f"{progress.records:,} records, {progress.bytes / 1e6:,.1f} MB in {progress.seconds:.0f} s",
        f"lag {lag}" + (f" ({counted(unknown, 'shard')} not read yet)" if unknown else ""),
        counted(len(progress.leases), "lease"),
    ]
    parts += [f"{len(progress.stalled)} stalled"] if progress.stalled else []
    parts += [f"{len(progress.paused)} paused"] if progress.paused else []
    return "; ".join(parts)
