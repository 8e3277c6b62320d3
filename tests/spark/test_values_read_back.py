"""Values of every type through each write path, read back by every reader.

Spark reads the data files with the partition values of the log, as Delta Lake does: it casts them.
Its session is not in UTC.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import reduce
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from kcl_pipeline import DeltaSink
from kcl_pipeline.batch import BatchWriter
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.delta_tables import Committer, entry
from tests.support.spark_batches import batch

NAN, INF = float("nan"), float("inf")
FIRST = dt.datetime(1, 1, 1)  # noqa: DTZ001 (columns without a zone)
LAST = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)  # noqa: DTZ001
GREGORIAN = dt.datetime(1582, 10, 10, 1, 2, 3, 4)  # noqa: DTZ001 (not in the calendar of old Java)
SUMMER = dt.datetime(2026, 3, 29, 2, 30)  # noqa: DTZ001 (no local time in Berlin)
LOCAL = [FIRST, GREGORIAN, LAST, SUMMER, None]
ZONED = [one and one.replace(tzinfo=dt.UTC) for one in LOCAL]
DAYS = [one and one.date() for one in LOCAL]
TEXTS = ["", "a b/c=d%20?#&:'\"\\{}[]^`|~*<>", "ü\U0001f600\u202e", ".. line\nend\t\x7f", None]
WHOLE = {f"int{bits}": [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0] for bits in (8, 16, 32, 64)}
PARTS = {
    "flag": (pa.bool_(), [True, False, True, False, None]),
    **{name: (pa.type_for_alias(name), [*values, 1, None]) for name, values in WHOLE.items()},
    "text": (pa.string(), TEXTS),
    "day": (pa.date32(), DAYS),
    "at": (pa.timestamp("us", "UTC"), ZONED),
    "local": (pa.timestamp("us"), LOCAL),
    "amount": (
        pa.decimal128(38, 10),
        [
            Decimal("9" * 28 + "." + "9" * 10),
            Decimal("0.0000000001"),
            Decimal(-7),
            Decimal(0),
            None,
        ],
    ),
    "float32": (pa.float32(), [NAN, INF, -INF, 0.1, None]),
    "float64": (pa.float64(), [NAN, INF, -INF, 5e-324, None]),
}
VALUES = PARTS | {
    "bytes": (pa.binary(), [b"", b"\0\xff", b"caf\xe9", b"x" * 70_000, None]),
    "negative": (
        pa.decimal128(5, 2),
        [Decimal("-999.99"), Decimal("-0.01"), Decimal(1), Decimal(0), None],
    ),
    "texts": (pa.list_(pa.string()), [[], ["", None], TEXTS[1:3], [TEXTS[3]], None]),
    "inner": (
        pa.struct([("at", pa.timestamp("us", "UTC")), ("days", pa.list_(pa.date32()))]),
        [{"at": at, "days": [day, None]} for at, day in zip(ZONED[:4], DAYS, strict=False)]
        + [None],
    ),
    "pairs": (
        pa.map_(pa.string(), pa.struct([("x", pa.float64())])),
        [[], [("", {"x": NAN})], [("k", None), ("l", {"x": None})], [(TEXTS[1], {"x": INF})], None],
    ),
}


def table_of(values: dict[str, tuple[pa.DataType, list]]) -> pa.Table:
    columns = {name: pa.array(rows, kind) for name, (kind, rows) in values.items()}
    return pa.table({"n": pa.array(range(5), pa.int64()), **columns})


def returning(result: pa.Table) -> Callable[[DataFrame], DataFrame]:
    """A transform whose rows are these, for any record."""
    schema = from_arrow_schema(result.schema)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for given in batches:
            if given.num_rows:
                yield from result.to_batches()

    return lambda frame: frame.mapInArrow(rows, schema)


# `test_file_tasks` compares what tasks write with the result in memory
BY_TASKS = pytest.param("spark by tasks", marks=pytest.mark.long)


@pytest.fixture(params=["arrow", "spark in memory", BY_TASKS])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "spark by tasks":
        monkeypatch.setattr(ArrowMemory, "prepare", lambda _self: False)
    return request.param


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", zone)


def landed(
    way: str, spark: SparkSession, uri: str, result: pa.Table, by: tuple[str, ...] = ()
) -> None:
    writer: BatchWriter
    if way == "arrow":
        writer = ArrowBatchWriter(lambda _: result, uri, by)
    else:
        writer = SparkBatchWriter(spark, returning(result), uri, by)
    written = writer.write(batch(b"1"))
    sink = Committer(DeltaSink(uri, by), "app")
    sink.ensure(written.output_schema)
    assert sink.land(written, [entry("a", 1)]).version is not None


def by_spark(spark: SparkSession, table: DeltaTable, like: pa.Schema) -> pa.Table:
    adds = pa.table(table.get_add_actions()).to_pylist()
    assert len(adds) == len(table.file_uris())
    log = [
        json.loads(line)["add"]
        for entry in sorted(
            (Path(table.table_uri.removeprefix("file://")) / "_delta_log").glob("*.json")
        )
        for line in entry.read_text().splitlines()
        if "add" in json.loads(line)
    ]
    return pa.concat_tables(
        [
            reduce(
                lambda frame, part: frame.withColumn(
                    part[0],
                    f.lit(part[1]).cast(
                        from_arrow_schema(like).fields[like.get_field_index(part[0])].dataType
                    ),
                ),
                add["partitionValues"].items(),
                spark.read.parquet(uri),
            )
            .select(*[f"`{name}`" for name in like.names])
            .toArrow()
            .cast(like)
            for add, uri in zip(log, table.file_uris(), strict=True)
        ]
    )


def read_back(spark: SparkSession, uri: str, like: pa.Schema) -> dict[str, list[str]]:
    """The rows by each reader, as text: a NaN equals no value."""
    table = DeltaTable(uri)
    assert len(table.to_pandas()) == len(table.to_pyarrow_table()), "also in the types of numpy"
    query = QueryBuilder().register("t", table).execute("select * from t")
    found = {
        "deltalake": table.to_pyarrow_table(),
        "query": pa.table(query.read_all()),
        "pandas": pa.Table.from_pandas(
            table.to_pandas(types_mapper=pd.ArrowDtype), preserve_index=False
        ),
        "spark": by_spark(spark, table, like),
    }
    return {name: shown(rows.select(like.names).cast(like)) for name, rows in found.items()}


def shown(rows: pa.Table) -> list[str]:
    return [repr(row) for row in rows.sort_by("n").to_pylist()]


@pytest.mark.parametrize("by", [(), tuple(PARTS)], ids=["columns", "partitions"])
def test_values_are_equal_for_every_reader(
    session: SparkSession, tmp_path: Path, way: str, by: tuple[str, ...]
) -> None:
    given = table_of(VALUES)
    landed(way, session, str(tmp_path / "t"), given, by)
    if by:  # the log has no empty text
        texts = [one or None for one in given["text"].to_pylist()]
        at = given.schema.get_field_index("text")
        given = given.set_column(at, "text", pa.array(texts, pa.string()))
    expected = shown(given)
    found = read_back(session, str(tmp_path / "t"), given.schema)
    wrong = {
        name: [(row, want) for row, want in zip(rows, expected, strict=True) if row != want]
        for name, rows in found.items()
    }
    assert wrong == {name: [] for name in found}
    DeltaTable(str(tmp_path / "t")).optimize.compact()
    assert (
        shown(
            DeltaTable(str(tmp_path / "t"))
            .to_pyarrow_table()
            .select(given.column_names)
            .cast(given.schema)
        )
        == expected
    )
