"""A user's function gives the same rows and types, whichever way the records reach Spark and the
result reaches the table.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from kcl_pipeline.batch import RECORD_SCHEMA, Batch
from kcl_pipeline.events import Event
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.writer import SparkBatchWriter, records_frame
from tests.support.result_files import contents, writers
from tests.support.shortened import shortened
from tests.support.spark_batches import NOW
from tests.support.spark_functions import FUNCTIONS, rows_of

pytestmark = pytest.mark.spark


def numbered(first: int, last: int) -> pa.Table:
    """Records with JSON, texts that are not ASCII, and nulls."""
    rows = [
        {
            "stream": "orders",
            "shard_id": f"shardId-{number % 3:012d}",
            "sequence_number": str(10**37 + number),
            "sub_sequence_number": number % 5,
            "partition_key": f"key-{number % 50}" if number % 7 else f"schlüssel-{number}",
            "explicit_hash_key": None if number % 3 else str(2**100 + number),
            "data": json.dumps(
                {
                    "order": number,
                    "items": [{"sku": n, "n": n, "price": n / 4} for n in range(number % 4)],
                    "amount": f"{number}.125",
                    "tags": {f"t{n}": n for n in range(number % 3)},
                    "at": "2026-03-29T02:30:00+02:00",
                }
            ).encode(),
            "approximate_arrival_timestamp": NOW + dt.timedelta(milliseconds=number * 137),
            "encryption_type": "KMS" if number % 4 == 0 else None,
        }
        for number in range(first, last)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)


NOTHING = RECORD_SCHEMA.empty_table()
GIVEN = pa.concat_tables(
    [NOTHING, numbered(0, 130), NOTHING, numbered(130, 137).slice(3), numbered(137, 300), NOTHING]
)


@pytest.fixture(scope="module")
def arrow(spark) -> ArrowMemory:
    skipped: list[object] = []
    memory = ArrowMemory(spark, MemoryBudget(2**29), skipped.append)
    assert memory.prepare(), skipped
    return memory


@contextmanager
def adaptive(spark, *, on: bool) -> Iterator[None]:
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", str(on).lower())
    try:
        yield
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
        spark.catalog.clearCache()


def by_arrow(arrow: ArrowMemory, name: str, given: pa.Table, parts: int):
    with arrow.frame(given, parts) as frame:
        assert frame is not None
        return rows_of(FUNCTIONS[name](frame))


def named(frame: DataFrame) -> DataFrame:
    """With other names if a name repeats, which a table refuses."""
    names = {name.lower() for name in frame.columns}
    if len(names) == len(frame.columns):
        return frame
    return frame.toDF(*[f"c{number}" for number in range(len(frame.columns))])


# One of each kind of plan; `make test-long` has all of them
KINDS = [
    "identity", "no column", "no row", "exploded", "join with itself", "cached", "rows of an RDD",
    "Python function", "mapInArrow",
]  # fmt: skip
# Those that adaptive execution plans in another way; `make test-long` has all of them
ADAPTIVE = ["aggregates", "applyInPandas"]


@pytest.mark.parametrize(
    ("name", "on"),
    [(name, False) for name in KINDS]
    + [(name, True) for name in ADAPTIVE]
    + [
        pytest.param(name, on, marks=pytest.mark.long)
        for name in FUNCTIONS
        for on in (False, True)
        if name not in (ADAPTIVE if on else KINDS)
    ],
)
def test_a_function_gives_the_same_rows(spark, tmp_path: Path, name: str, on: bool) -> None:
    """In files, with and without adaptive execution, as `createDataFrame` and `toArrow`."""
    events: list[Event] = []
    schemas = []

    def noting(frame: DataFrame) -> DataFrame:
        result = named(FUNCTIONS[name](frame))
        schemas.append(result.schema)
        return result

    writer = SparkBatchWriter(spark, noting, str(tmp_path), events=events.append)
    with adaptive(spark, on=False):
        schema, wanted = rows_of(named(FUNCTIONS[name](records_frame(spark, GIVEN))))
    with adaptive(spark, on=on):
        files = writer.write(Batch("b", (), GIVEN)).files
        tables = [pq.read_table(tmp_path / file.path) for file in files]
        assert sorted(repr(row) for table in tables for row in table.to_pylist()) == wanted
    assert schemas == [schema]
    assert events == []
    assert writer._arrow._java.mappedBytes() == 0


@pytest.mark.parametrize("on", [False, pytest.param(True, marks=pytest.mark.long)])
def test_records_without_a_key_have_a_null_key(spark, tmp_path: Path, on: bool) -> None:
    """A stream that distributes its records itself returns them."""
    column = GIVEN.schema.get_field_index("partition_key")
    keys = [None if n % 3 else key for n, key in enumerate(GIVEN.column(column).to_pylist())]
    keyless = GIVEN.set_column(column, GIVEN.schema.field(column), pa.array(keys, pa.string()))
    chosen = ("sequence_number", "partition_key", "partition_key IS NULL AS missing")
    writer = SparkBatchWriter(spark, lambda frame: frame.selectExpr(*chosen), str(tmp_path))
    with adaptive(spark, on=on):
        files = writer.write(Batch("b", (), keyless)).files
    rows = [row for f in files for row in pq.read_table(tmp_path / f.path).to_pylist()]
    found = {row["sequence_number"]: row["partition_key"] for row in rows}
    assert found == dict(zip(GIVEN["sequence_number"].to_pylist(), keys, strict=True))
    assert all(row["missing"] == (row["partition_key"] is None) for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_files_of_python_tasks(spark, tmp_path: Path, name: str) -> None:
    events: list[Event] = []
    by_arrow, own = writers(spark, tmp_path, FUNCTIONS[name], events=events)
    for on in (False, True):
        with adaptive(spark, on=on):
            given = Batch("b", (), GIVEN)
            assert contents(by_arrow, given) == contents(own, given)
    assert events == []


@pytest.mark.long
@pytest.mark.parametrize("by", [(), ("k",), ("k", "day")])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_partitioned_files_are_the_same(
    spark, tmp_path: Path, name: str, rows: int, by: tuple[str, ...]
) -> None:
    def keyed(frame: DataFrame) -> DataFrame:
        return FUNCTIONS[name](frame).selectExpr(
            "*",
            "element_at(array('a', null, 'ü/='), 1 + monotonically_increasing_id() % 3) AS k",
            "date'2026-01-01' AS day",
        )

    by_arrow, own = writers(spark, tmp_path, FUNCTIONS[name] if not by else keyed, by)
    given = Batch("b", (), GIVEN.slice(0, rows))
    for on in (False, True):
        with adaptive(spark, on=on):
            assert contents(by_arrow, given) == contents(own, given)


@pytest.mark.long
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_transfer_gives_the_same_rows(
    spark, arrow: ArrowMemory, name: str, rows: int, parts: int
) -> None:
    given = GIVEN.slice(0, rows)
    for on in (False, True):
        with adaptive(spark, on=on):
            wanted = rows_of(FUNCTIONS[name](records_frame(spark, given)))
            assert by_arrow(arrow, name, given, parts) == wanted


@pytest.mark.parametrize(
    ("name", "rows"),
    shortened(
        product(["identity", "aggregates", "mapInArrow", "whole aggregate"], (0, 1)),
        {("identity", 1), ("mapInArrow", 0), ("whole aggregate", 0)}.__contains__,
    ),
)
def test_few_rows(spark, arrow: ArrowMemory, name: str, rows: int) -> None:
    given = GIVEN.slice(0, rows)
    wanted = rows_of(FUNCTIONS[name](records_frame(spark, given)))
    assert by_arrow(arrow, name, given, 2) == wanted


def test_big_records(spark, arrow: ArrowMemory) -> None:
    column = GIVEN.schema.get_field_index("data")
    big = [bytes([number]) * (10 * 2**20 + number) for number in range(4)]
    given = GIVEN.slice(0, 4).set_column(
        column, GIVEN.schema.field(column), pa.array(big, pa.binary())
    )
    with arrow.frame(given, 2) as frame:
        assert frame is not None
        assert frame.where("length(data) > 10485761").count() == 2
        assert frame.toArrow().column("data").to_pylist() == big


def test_many_small_chunks(spark, arrow: ArrowMemory) -> None:
    chunked = pa.concat_tables([GIVEN.slice(number, 1) for number in range(300)])
    with arrow.frame(chunked, 3) as frame:
        assert frame is not None
        assert frame.toArrow().cast(GIVEN.schema).equals(GIVEN)
