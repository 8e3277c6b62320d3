"""Values that no table holds, through both Spark paths: each is a dead letter, the others land.

A worker of the test kit runs on two cores. The table has a partition column of each kind and NOT
NULL columns. It is read back with deltalake, pandas, the SQL engine of deltalake, and Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.events import ShardPaused
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.testing import PipelineTest
from kcl_pipeline.worker.summary import StopReason

POSITION = ("shard_id", "sequence_number", "sub_sequence_number")
LATE = "timestamp_micros(253402300800000000)"
EARLY = "timestamp_micros(-62135596800000001)"
NOON = "timestamp'2026-05-04 12:00:00'"
LATE_NTZ = "timestamp_ntz'9999-12-31 23:59:59' + interval 1 second"
LATE_DAY = "date_add(date'9999-12-31', 1)"
LATIN = "cast(unhex('636166e91b5b324a') as string)"
LONG = f"concat({LATIN}, repeat('x', 500))"
NESTED = "named_struct('x', array(named_struct('y', array({}))))"
MAP_OF_NULL = "map('a', cast(null as int))"

VALUES = {
    # Name of a column: its type in the table, a good value, and bad values by name.
    "at": (
        pa.timestamp("us", "UTC"),
        NOON,
        {"late": LATE, "early": EARLY, "far": "timestamp_seconds(9223372036854)"},
    ),
    "at_ntz": (pa.timestamp("us"), "timestamp_ntz'0001-01-01'", {"late": LATE_NTZ}),
    "day": (
        pa.date32(),
        "date'2026-05-04'",
        {
            "late": LATE_DAY,
            "early": "date_sub(date'0001-01-01', 1)",
            "far": "date_from_unix_date(20743000)",
        },
    ),
    "text": (
        pa.string(),
        "'caf\u00e9\\0\U0001f600'",
        {
            "latin": LATIN,
            "long": LONG,
            "surrogate": "cast(unhex('eda080') as string)",
            "cut": "cast(unhex('61c3') as string)",
            "overlong": "cast(unhex('c080') as string)",
        },
    ),
    "days": (
        pa.list_(pa.date32()),
        "array(null)",
        {"late": f"array(date'2026-01-01', {LATE_DAY})"},
    ),
    "texts": (pa.list_(pa.string()), "array('')", {"latin": f"array(null, {LATIN})"}),
    "deep": (
        pa.struct(
            [("x", pa.list_(pa.struct([("y", pa.list_(pa.timestamp("us", "UTC")))])))],
        ),
        NESTED.format(NOON),
        {"late": NESTED.format(f"null, {LATE}")},
    ),
    "by_text": (
        pa.map_(pa.string(), pa.string()),
        "map('', null)",
        {"key": f"map({LATIN}, 'b')", "value": f"map('a', {LATIN})"},
    ),
    "by_day": (
        pa.map_(pa.date32(), pa.timestamp("us")),
        "map(date'9999-12-31', timestamp_ntz'2026-01-01')",
        {
            "key": f"map({LATE_DAY}, timestamp_ntz'2026-01-01')",
            "value": f"map(date'2026-01-01', {LATE_NTZ})",
        },
    ),
    "required": (pa.field("", pa.int64(), False), "1L", {"null": "cast(null as bigint)"}),
    "inner": (
        pa.struct([pa.field("x", pa.int32(), False)]),
        "cast(null as struct<x: int>)",
        {"null": "named_struct('x', cast(null as int))"},
    ),
    "elements": (
        pa.list_(pa.field("element", pa.int32(), False)),
        "array(1)",
        {"null": "array(1, cast(null as int))"},
    ),
    "entries": (
        pa.map_(pa.string(), pa.field("value", pa.int32(), False)),
        "map('a', 1)",
        {"null": MAP_OF_NULL},
    ),
    "amount": (
        pa.decimal128(5, 2),
        "cast(1.25 as decimal(20, 3))",
        {"large": "cast(1000 as decimal(20, 3))", "fine": "cast(1.255 as decimal(20, 3))"},
    ),
    "ratio": (pa.float64(), "7L", {"odd": "9007199254740993L"}),
    "parsed": (
        pa.decimal128(10, 2),
        "cast('1.5' as decimal(10, 2))",
        {"nan": "cast('NaN' as decimal(10, 2))"},
    ),
    "raised": (
        pa.int32(),
        "1",
        {
            "zero": "cast(1 div 0 as int)",
            "foreign": f"cast(raise_error(concat('a\n', {LATIN})) as int)",
        },
    ),
}
PARTS = {
    "p_day": (pa.date32(), "date'2026-05-04'", {"late": LATE_DAY}),
    "p_at": (pa.timestamp("us", "UTC"), NOON, {"early": EARLY}),
    "p_text": (
        pa.field("", pa.string(), False),
        "'a b=%2F'",
        {
            "latin": LATIN,
            "null": "cast(null as string)",
            "empty": "''",
            "long": "repeat('\u00fc', 300)",
        },
    ),
    "p_amount": (
        pa.decimal128(5, 2),
        "cast(1.25 as decimal(5, 2))",
        {"large": "cast(1000 as decimal(20, 2))", "negative": "cast(-0.5 as decimal(5, 2))"},
    ),
    "p_number": (pa.field("", pa.int32(), False), "7", {"null": "cast(null as int)"}),
}
COLUMNS = VALUES | PARTS
BAD = [f"{name} {kind}" for name, (_, _, bad) in COLUMNS.items() for kind in bad]
RAISED = ("parsed", "raised")
NOT_UTF8 = b"caf\xe9 \x1b[2J"
FIELDS = {
    name: kind.with_name(name) if isinstance(kind, pa.Field) else pa.field(name, kind)
    for name, (kind, _, _) in COLUMNS.items()
}
SCHEMA = pa.schema(
    [pa.field("id", pa.string()), pa.field("raw", pa.string()), *FIELDS.values()],
)


def transform(frame: DataFrame) -> DataFrame:
    """A record names the bad value that its row has."""
    text = f.col("data").cast("string")
    chosen = f.get_json_object(text, "$.bad")

    def column(name: str) -> Column:
        _, good, bad = COLUMNS[name]
        value = f.expr(good)
        for kind, expression in bad.items():
            value = f.when(chosen == f"{name} {kind}", f.expr(expression)).otherwise(value)
        return value.alias(name)

    error = f.when(chosen == "rejected", f.expr(f"concat('no ', {LONG})"))
    return frame.select(
        f.get_json_object(text, "$.id").alias("id"),
        text.alias("raw"),
        *[column(name) for name in COLUMNS],
        error.alias("_error"),
        *[f.col(name).alias(f"_{name}") for name in POSITION],
    )


# What tasks refuse is also in `test_file_tasks`
@pytest.fixture(params=["in memory", pytest.param("by tasks", marks=pytest.mark.long)])
def session(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> Iterator[SparkSession]:
    if request.param == "by tasks":
        monkeypatch.setattr(ArrowMemory, "prepare", lambda _self: False)
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", zone)


def counts_by_reader(spark: SparkSession, uri: str) -> dict[str, int]:
    """The rows that each reader returns; it evaluates all their columns."""
    table = DeltaTable(uri)
    query = QueryBuilder().register("t", table).execute("select * from t")
    files = spark.read.parquet(*table.file_uris())
    return {
        "deltalake": len(table.to_pyarrow_table().to_pylist()),
        "pandas": len(table.to_pandas()),
        "query": len(pa.table(query.read_all()).to_pylist()),
        "spark": len(files.collect()),
    }


def test_each_value_that_no_table_holds_is_a_dead_letter_and_the_others_land(
    session: SparkSession,
) -> None:
    pipeline = KinesisPipeline(
        name="bad",
        streams=["orders"],
        transform=transform,
        sink=DeltaSink("unused", partition_by=tuple(PARTS)),
    )
    with PipelineTest(pipeline, shards=2) as test:
        uri = test.pipeline.sink.uri
        DeltaTable.create(uri, SCHEMA, partition_by=list(PARTS))
        good = [f"good{number}" for number in range(80)]
        for name in good:
            test.put({"id": name})
        for name in [*BAD, "rejected"]:
            test.put({"id": f"bad {name}", "bad": name})
        test.put(NOT_UTF8)
        test.run()
        assert {row["id"] for row in test.rows()} == set(good)
        letters = {one["data"]: one["error"] for one in test.dead_letters()}
        raw = letters.pop(NOT_UTF8)
        assert raw == r"column raw: b'caf\xe9 \x1b[2J' is not UTF-8"
        errors = {json.loads(data)["bad"]: error for data, error in letters.items()}
        assert errors.keys() == {*BAD, "rejected"}
        assert {error: len(error) for error in errors.values() if len(error) > 600} == {}
        assert [error for error in errors.values() if not error.isprintable()] == []
        named = {name for name, error in errors.items() if f"column {name.split()[0]}" in error}
        assert named == {name for name in BAD if name.split()[0] not in RAISED}
        counts = counts_by_reader(session, uri)
        assert counts == dict.fromkeys(counts, len(good))
        DeltaTable(uri).optimize.compact()
        counts = counts_by_reader(session, uri)
        assert counts == dict.fromkeys(counts, len(good))


REFUSED = {
    "array<variant>": "array(parse_json('1'))",
    "interval day": "named_struct('x', interval 1 day)",
    "interval month": "map('a', interval '1' month)",
}


def test_a_type_that_no_table_has_pauses_the_shards_with_a_sentence(spark: SparkSession) -> None:
    chosen = [""]
    pipeline = KinesisPipeline(
        name="refused",
        streams=["orders"],
        transform=lambda frame: frame.select("data", f.expr(chosen[0]).alias("v")),
        sink=DeltaSink("unused"),
    )
    with PipelineTest(pipeline) as test:
        test.put(b"a", b"b")
        for kind, expression in REFUSED.items():
            chosen[0] = expression
            test.events.clear()
            assert test.run().reason is StopReason.FAILED
            [reason] = {one.reason for one in test.events.of(ShardPaused)}
            assert kind.split("<")[-1].rstrip(">") in reason
            assert "v:" in reason
        assert test.dead_letters() == []
        chosen[0] = "'fixed'"
        test.run()
        assert [row["v"] for row in test.rows()] == ["fixed", "fixed"]
