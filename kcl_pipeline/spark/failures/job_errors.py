"""Classify errors of Spark jobs, and extract the line that states the cause."""

from __future__ import annotations

import re
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException

from kcl_pipeline.batch import frame_in, frame_of, message_of, with_frame
from kcl_pipeline.errors import BrokenTransformError, KclError, SinkError, TransformFailedError
from kcl_pipeline.spark.failures.outcomes import MAX_CAUSES, TaskError

_CRASHED: Final = "a Python worker of Spark crashed in it"
_WRITING_FAILED: Final = (
    "org.apache.hadoop.",
    "java.io.",
    "java.nio.file.",
    "java.net.",
    "java.lang.OutOfMemoryError",
)
_NOT_BY_RECORDS: Final = re.compile(  # messages about lost executors and stopped jobs
    r"ExecutorLostFailure|Executor heartbeat timed "
    r"out|FetchFailed|TaskResultLost|TaskKilled|failed to connect back|[Jj]ob \S*\s?cancelled"
    r"|SparkContext (was|has been) shut ?down|stopped SparkContext|removed our "
    r"application|is closed"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_SQL_STATE: Final = " SQLSTATE: "
_SINK_ERROR_IN_TASK: Final = f"{SinkError.__module__}.{SinkError.__name__}:"


def classified(error: BaseException, records: int | None) -> KclError:
    """Decide whether the transform or the sink caused an error.

    I/O errors, lost executors and a dead JVM in the Java causes are errors of the sink. So are
    unknown errors: a batch that is repeated loses nothing, but a wrong dead letter would be missing
    in the table.
    """
    if isinstance(error, AnalysisException):
        messages = str(error)
        line = _line(error, messages)
        text = with_frame(f"{type(error).__name__}: {line}", _frame(error, messages))
        return BrokenTransformError(f"the transform failed: {text}", detail=text)
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    gone = isinstance(error, ConnectionError) or (isinstance(error, Py4JError) and java is None)
    causes = error.causes if isinstance(error, TaskError) else [] if gone else _java_causes(java)
    messages = "\n".join(text for _, text in causes) or message_of(error)
    from_java = isinstance(error, Py4JJavaError | TaskError)
    line = _java_line(causes) if from_java else _line(error, messages)
    if _SINK_ERROR_IN_TASK in messages:
        return SinkError(messages.rpartition(_SINK_ERROR_IN_TASK)[2].strip().splitlines()[0])
    crashed = any("Python worker exited unexpectedly" in text for _, text in causes)
    lost = any(
        _NOT_BY_RECORDS.search(text.partition("\n")[0])
        for name, text in causes
        if name.startswith("org.apache.spark.")
    )
    if (
        gone
        or lost
        or (not crashed and any(name.startswith(_WRITING_FAILED) for name, _ in causes))
    ):
        return SinkError(f"writing failed: {line}")
    text = with_frame(_CRASHED if crashed else line, _frame(error, messages))
    given = "" if records is None else f" on {records} records"
    return TransformFailedError(f"the transform failed{given}: {text}", detail=text)


def _frame(error: BaseException, messages: str) -> str | None:
    """The frame in the user's code, from the traceback of a Python task or of this process."""
    return frame_in(messages) or frame_of(error.__traceback__)


def _java_causes(java: Any) -> list[tuple[str, str]]:
    """Class and message of an error and its causes. Messages of Python tasks have a traceback.

    `str` of the error would ask the JVM for more, which takes about 100 ms: all stack traces, which
    fill more than one buffer of the JVM's socket, so that the second one waits 40 ms for a delayed
    acknowledgement of the first; or the parameters of the message, whose iteration ends with a Java
    error that pyspark examines.
    """
    causes: list[tuple[str, str]] = []
    # A chain of causes can be circular.
    while java is not None and len(causes) < MAX_CAUSES:
        causes.append((str(java.getClass().getName()), str(java.getMessage() or "")))
        java = java.getCause()
    return causes


def spark_line(error: BaseException) -> str:
    """The line of a Spark error that states the cause.

    It is the innermost Python error, Spark's first line, or the last Java cause.
    """
    java = getattr(error, "java_exception", None)
    return _line(error, message_of(error)) if java is None else _java_line(_java_causes(java))


def _java_line(causes: list[tuple[str, str]]) -> str:
    name, text = causes[-1]
    first = text.splitlines()[0] if text else ""
    return _python_line(text) or f"{name.rpartition('.')[2]}: {first}".removesuffix(": ")


def _line(error: BaseException, messages: str) -> str:
    prefix = "" if isinstance(error, PySparkException) else f"{type(error).__name__}: "
    return _python_line(messages) or prefix + next(iter(_lines(messages)), "")


def _python_line(messages: str) -> str | None:
    """The line of the error at the end of a Python traceback. None: there is no traceback."""
    lines = _lines(messages)
    if not any(line.endswith(_TRACEBACK) for line in lines):
        return None
    lines = [line for line in lines if not line.startswith(_SQL_STATE)]
    after = max((n for n, line in enumerate(lines, 1) if line.startswith(" ")), default=len(lines))
    return lines[min(after, len(lines) - 1)]


def _lines(messages: str) -> list[str]:
    return [line for line in messages.strip().splitlines() if line.strip()]
