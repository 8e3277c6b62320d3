"""What a writer says about functions, tables and machines that fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.functions import udf

from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.errors import BrokenTransformError, SinkError, TransformFailedError
from kcl_pipeline.spark.failures.job_errors import classified
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.spark_batches import batch, spark_writer


def _python_error(frame):
    def refuse(data):
        if data == b"bad":
            raise ValueError("cannot take this\nsecond line")
        return 1

    return frame.select(udf(refuse, "int")("data").alias("x"))


def _arrow_error(frame):
    def refuse(batches):
        for _ in batches:
            raise OSError("the function's own")
        yield from ()

    return frame.mapInArrow(refuse, frame.schema)


class SilentError(Exception):
    """Its message cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def _silent(frame):
    raise SilentError


def _crash(frame):
    return frame.select(udf(lambda _: os._exit(3), "int")("data").alias("x"))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (_python_error, "1 records: ValueError: cannot take this"),
        (_arrow_error, "OSError: the function's own"),
        (_crash, "a Python worker of Spark crashed in it"),
        (
            lambda frame: frame.selectExpr("cast(cast(data as string) as int) x"),
            "CAST_INVALID_INPUT",
        ),
        (lambda frame: frame.selectExpr("cast(raise_error('no good') as int) x"), "no good"),
        (lambda frame: frame.select("nope"), "nope"),
        (lambda frame: {}["k"], "KeyError: 'k'"),
        (lambda frame: sys.exit(2), "SystemExit: 2"),
        (_silent, "SilentError"),
        (lambda frame: None, "returned NoneType"),
    ],
)
def test_what_the_function_raises_is_its_own_fault_and_told_in_a_line(
    spark, tmp_path: Path, transform, message: str
) -> None:
    with pytest.raises(TransformFailedError) as caught:
        spark_writer(spark, tmp_path, transform).write(batch(b"bad"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "returned" in message or caught.value.__cause__ is not None
    assert spark.range(3).count() == 3, "the session goes on"


def test_what_cannot_be_written_is_the_sinks_fault(spark, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for in_memory in (True, False):
        writer = SparkBatchWriter(spark, None, str(tmp_path / "file" / "table"))
        if not in_memory:
            writer._arrow.prepare = lambda: False  # type: ignore[method-assign]
        with pytest.raises(SinkError, match="could not write") as caught:
            writer.write(batch(b"1"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("transform", "by", "message"),
    [
        (None, ("day",), "partition_by names day"),
        (lambda frame: frame.selectExpr("interval 1 day gap"), (), "gap: interval day"),
        (lambda frame: frame.selectExpr("parse_json('[1]') v", "data"), (), "v: variant"),
        (lambda frame: frame.selectExpr("'a' collate unicode t"), (), "t: string collate UNICODE"),
        (lambda frame: frame.selectExpr("array(1) a", "1 A"), (), "A is there twice"),
        (lambda frame: frame.selectExpr("named_struct() s"), (), "s is null and without a type"),
        (lambda frame: frame.select(), (), "no columns"),
    ],
)
def test_columns_that_no_table_has_are_the_transforms_fault(
    spark, tmp_path: Path, transform, by, message: str
) -> None:
    with pytest.raises(BrokenTransformError, match=message) as caught:
        SparkBatchWriter(spark, transform, str(tmp_path / "t"), by).write(batch(b"1"))
    assert "\n" not in str(caught.value)


class JavaError(Exception):
    """As pyspark gives it: an exception with its Java one, which has a class, a message and a
    cause.
    """

    def __init__(self, *chain: tuple[str, str]) -> None:
        super().__init__(chain[0][1])
        self.java_exception = _throwable(chain)


def _throwable(chain):
    (name, text), *causes = chain
    getters = {
        "getClass": lambda: SimpleNamespace(getName=lambda: name),
        "getMessage": lambda: text,
        "getCause": lambda: _throwable(causes) if causes else None,
    }
    return SimpleNamespace(**getters)


ABORTED = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent "
    "failure: Lost task 0.3 in stage 3.0 (TID 8) (10.0.0.7 executor 1): "
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            ABORTED + "ExecutorLostFailure (executor 1 exited unrelated to the running tasks) "
            "Reason: Command exited with code 137",
            SinkError,
        ),
        (
            ABORTED
            + "ExecutorLostFailure (executor 1 exited) Reason: Executor heartbeat timed out "
            "after 143023 ms",
            SinkError,
        ),
        (
            (
                "Job aborted due to stage failure: ResultStage 4 has failed the maximum "
                "allowable number of times: 4. Most recent failure reason: FetchFailed"
            ),
            SinkError,
        ),
        ("Job 7 cancelled because SparkContext was shut down", SinkError),
        ("Job aborted due to stage failure: Master removed our application: KILLED", SinkError),
        (
            ABORTED + "org.apache.spark.SparkException: Python worker failed to connect back.",
            SinkError,
        ),
        (
            ABORTED + "org.apache.spark.api.python.PythonException: Traceback (most recent call "
            "last):\nValueError: ExecutorLostFailure",
            TransformFailedError,
        ),
        (ABORTED + "java.lang.ArithmeticException: divide by zero", TransformFailedError),
    ],
)
def test_good_records_are_not_blamed_for_machines_that_are_lost(
    text: str, kind: type[Exception]
) -> None:
    assert type(classified(JavaError(("org.apache.spark.SparkException", text)), 3)) is kind


def test_arrow_functions_fail_in_the_same_words(tmp_path: Path) -> None:
    def failing(_table: pa.Table) -> pa.Table:
        raise ValueError("cannot take this\nsecond line")

    for transform, message in [
        (failing, "1 records: ValueError: cannot take this"),
        (lambda table: 3, "returned int"),
    ]:
        with pytest.raises(TransformFailedError, match=message) as caught:
            ArrowBatchWriter(transform, str(tmp_path)).write(batch(b"1"))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SinkError, match="could not write"):
        ArrowBatchWriter(None, str(tmp_path / "file")).write(batch(b"1"))
