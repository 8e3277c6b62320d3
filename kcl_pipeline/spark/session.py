"""Build the Spark session with settings that are measured to be fast for small batches.

On `local[*]`, a small batch takes a quarter less time without adaptive execution and with as many
shuffle partitions as cores. Domain sockets save a third of the time of every job that starts
Python. Spark's Parquet writer is up to twice as fast without a dictionary for the payload. It is a
fifth faster without a dictionary for the sequence number. All settings can be overridden.

A worker warms its session up before it takes leases (`warm_up`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.delta.storage import cause_of, first_line
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.spark.java import require_java, require_user_name
from kcl_pipeline.text import printable

_LOG: Final = logging.getLogger(__name__)
_ALWAYS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.hadoop.parquet.enable.dictionary#data": "false",
    "spark.hadoop.parquet.enable.dictionary#sequence_number": "false",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
    "spark.sql.sources.commitProtocolClass": (
        "org.apache.spark.sql.execution.datasources.SQLHadoopMapReduceCommitProtocol"
    ),
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
# Each prints the stack trace of a failed task, which the exception contains too.
_QUIET_LOGGERS: Final = (
    "org.apache.spark.util.Utils",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.api.python.PythonRunner",
)
CONNECT_SECONDS: Final = 5.0
_LOCAL: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.adaptive.enabled": "false",
    # Otherwise a stack overflow in a task, which one record can cause, ends the driver's JVM.
    "spark.executor.killOnFatalError.depth": "0",
    # Not on a cluster, whose executors may not have this package.
    "spark.python.daemon.module": "kcl_pipeline.spark.python_daemon",
}


def session_settings(config: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of a new session: the measured ones, overridden by `config`.

    `spark.master` defaults to `local[*]`.
    """
    given = dict(config or {})
    master = given.get("spark.master", "local[*]")
    settings = {"spark.master": master, **_ALWAYS}
    if master.startswith("local"):
        settings |= _LOCAL | {"spark.sql.shuffle.partitions": str(_cores(master))}
    return settings | given


def build_session(app_name: str, config: Mapping[str, str] | None = None) -> SparkSession:
    """Return the active session of this process, or a new one.

    An existing session keeps its settings, except those in `config` that can change at run time.
    Install signal handlers after this call, because pyspark replaces the handler of SIGINT when
    its context starts.

    Raises:
        SettingsError: Java is missing or older than 17, the user id has no name, or no standalone
            master listens at the configured address.

    Example:
        >>> from kcl_pipeline import build_session
        >>> spark = build_session("shop", {"spark.driver.memory": "4g"})  # doctest: +SKIP
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        for key, value in (config or {}).items():
            if active.conf.isModifiable(key):
                with _without_values(config):
                    active.conf.set(key, value)
        return active
    prepare_process()
    settings = session_settings(config)
    require_master(settings["spark.master"])
    if settings["spark.master"].startswith("local"):
        # Otherwise Spark resolves the host name, warns, and listens on a public address.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with _without_values(config):
        session = SparkSession.builder.appName(app_name).config(map={**settings}).getOrCreate()
    session.sparkContext.setLogLevel(settings["spark.log.level"])
    _quiet(session)
    return session


@contextmanager
def _without_values(config: Mapping[str, str] | None) -> Iterator[None]:
    """Replace an error of Spark that shows the value of a property, which may be a secret."""
    try:
        yield
    except Exception as error:
        if cause_of(error, config) is error:
            raise
        raise SettingsError(
            f"Spark refuses a property of spark_config: {first_line(error, config)}. Write another "
            "value"
        ) from None


def prepare_process() -> None:
    """Prepare this process for a new session.

    Raises:
        SettingsError: Java is missing or older than 17, or the user id has no name.
    """
    require_java()
    require_user_name()
    # Otherwise Spark's Python workers run the first python3 on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def adopt_session(session: SparkSession) -> SparkSession:
    """Apply the settings of this package to a session that others created.

    These are the settings that can change at run time, except those that the session's
    configuration has.
    """
    given = {key for key, _ in session.sparkContext.getConf().getAll()}
    for key, value in session_settings({"spark.master": session.sparkContext.master or ""}).items():
        if key not in given and session.conf.isModifiable(key):
            session.conf.set(key, value)
    _quiet(session)
    return session


def warm_up(session: SparkSession) -> None:
    """Write one artificial record from Arrow to a temporary Parquet file.

    The first batch of a session is slow, because classes are loaded and code is generated.

    It never raises: the first batch will report an unusable session.
    """
    from kcl_pipeline.spark.writer import one_row  # noqa: PLC0415 (it loads all of Spark's path)

    with tempfile.TemporaryDirectory() as folder:
        try:
            session.createDataFrame(one_row(RECORD_SCHEMA)).selectExpr(
                "*", "from_json(cast(data as string), 'a string') as parsed"
            ).write.parquet((Path(folder) / "warm").as_uri())
        except PySparkException as error:
            _LOG.warning("cannot warm up the Spark session: %s", printable(str(error)))


def require_master(master: str) -> None:
    """Check that an address of `spark://host:port,host:port` accepts connections.

    Spark itself tries for a minute and prints a hundred lines. After that its context is unusable.

    Raises:
        SettingsError: No address accepts a connection.
    """
    if not master.startswith("spark://"):
        return
    errors = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
                return
        except (OSError, ValueError, OverflowError) as error:
            errors.append(f"{printable(address)}: {error}")
    raise SettingsError(
        f"spark.master={printable(master)} cannot be reached ({'; '.join(errors)}). Start the "
        "master, or write its address as spark://host:7077."
    )


def _quiet(session: SparkSession) -> None:
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001 (the only way to a logger's level)
    log4j = jvm.org.apache.logging.log4j
    for name in _QUIET_LOGGERS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    # This logger prints the same error as one line of JSON on standard error.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)


def _cores(master: str) -> int:
    inside = master.partition("[")[2].rstrip("]").split(",")[0].strip()
    if inside == "*":
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
    return int(inside) if inside.isdigit() else 1
