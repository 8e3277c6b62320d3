"""The log has minima, maxima and numbers of nulls, by which readers skip files."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter, indexed_columns, log_statistics
from kcl_pipeline.delta.maintenance import compact
from tests.support.announcing import announce, contend
from tests.support.delta_tables import committer, entry, seq

INSTANT = dt.datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=dt.UTC)


def write(uri: str, *tables: pa.Table, **settings: Any) -> None:
    """Commit each table as a file of its own."""
    sink = committer(uri, **settings)
    writer = ArrowBatchWriter(None, uri, settings.get("partition_by", ()))
    for number, table in enumerate(tables):
        files = writer.write(Batch("b", (), table))
        sink.ensure(files.output_schema)
        landed = sink.land(files, [entry("s", number + 1, seq(number))])
        assert landed.version is not None


def statistics(uri: str) -> list[dict[str, Any]]:
    """The statistics of each file, in the order of the commits."""
    found = []
    for path in sorted((Path(uri) / "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            add = json.loads(line).get("add")
            if add is not None:
                found.append(json.loads(add["stats"]))
    return found


def of(folder: Path, table: pa.Table, **settings: Any) -> dict[str, Any]:
    write(str(folder / "t"), table, **settings)
    (found,) = statistics(str(folder / "t"))
    return found


def bounds(found: dict[str, Any], name: str) -> tuple[Any, Any, Any]:
    return tuple(found.get(part, {}).get(name) for part in ("minValues", "maxValues", "nullCount"))


def test_each_type(tmp_path: Path) -> None:
    table = pa.table(
        {
            "long": pa.array([5, None, -(2**62)]),
            "double": pa.array([0.5, -1.25, None]),
            "text": ["b", "a", None],
            "day": [dt.date(2026, 1, 2), dt.date(1969, 12, 31), None],
            "at": pa.array([INSTANT, None, None], pa.timestamp("us", "UTC")),
            "local": pa.array([INSTANT.replace(tzinfo=None), None, None], pa.timestamp("us")),
            "price": pa.array([Decimal("12.10"), Decimal("-3.05"), None], pa.decimal128(10, 2)),
            "is_new": [True, None, False],
            "data": [b"x", None, None],
            "nothing": pa.array([None, None, None], pa.int32()),
            "tags": [["a"], None, []],
        }
    )
    found = of(tmp_path, table)
    assert found["numRecords"] == 3
    assert bounds(found, "long") == (-(2**62), 5, 1)
    assert bounds(found, "double") == (-1.25, 0.5, 1)
    assert bounds(found, "text") == ("a", "b", 1)
    assert bounds(found, "day") == ("1969-12-31", "2026-01-02", 1)
    rounded = "2026-01-02T03:04:05.123", "2026-01-02T03:04:05.124"
    assert bounds(found, "at") == (f"{rounded[0]}Z", f"{rounded[1]}Z", 2)
    assert bounds(found, "local") == (*rounded, 2)
    assert bounds(found, "price") == (-3.05, 12.1, 1)
    assert bounds(found, "is_new") == (None, None, 1)
    assert bounds(found, "data") == (None, None, 2)
    assert bounds(found, "nothing") == (None, None, 3)
    assert bounds(found, "tags") == (None, None, None)


def test_a_zone_is_an_instant(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([INSTANT], pa.timestamp("us", "UTC"))})
    zoned = table.set_column(0, "at", table["at"].cast(pa.timestamp("us", "Asia/Tokyo")))
    assert bounds(of(tmp_path, zoned), "at")[0] == "2026-01-02T03:04:05.123Z"


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("a" * 32, "a" * 32, "a" * 32),
        ("a" * 33, "a" * 32, "a" * 31 + "b"),
        ("é" * 40, "é" * 32, "é" * 31 + "ê"),
        ("a" * 31 + "\U0010ffff" * 2, "a" * 31 + "\U0010ffff", "a" * 30 + "b"),
        ("a" * 31 + "\ud7ffz", "a" * 31 + "\ud7ff", "a" * 31 + "\ue000"),
        ("\U0010ffff" * 33, "\U0010ffff" * 32, None),
    ],
)
def test_a_long_string(tmp_path: Path, value: str, least: str, most: str | None) -> None:
    assert bounds(of(tmp_path, pa.table({"v": [value]})), "v") == (least, most, 0)
    assert least <= value
    assert most is None or value <= most


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_without_a_bound(tmp_path: Path, value: float) -> None:
    found = of(tmp_path, pa.table({"v": [1.0, value], "w": [{"x": 1.0}, {"x": value}]}))
    least, most, nulls = bounds(found, "v")
    assert nulls == 0
    assert least == (1.0 if value == math.inf else None)
    assert most == (1.0 if value == -math.inf else None)
    assert found["nullCount"]["w"] == {"x": 0}
    assert found.get("maxValues", {}).get("w") == ({"x": 1.0} if value == -math.inf else None)


def test_a_decimal_that_no_double_has(tmp_path: Path) -> None:
    price = pa.array([Decimal("12345678901234567.89"), Decimal("0.01")], pa.decimal128(20, 2))
    assert bounds(of(tmp_path, pa.table({"v": price})), "v") == (0.01, None, 0)


def test_fields_of_structs(tmp_path: Path) -> None:
    kind = pa.struct([("x", pa.int64()), ("in", pa.struct([("y", pa.string())]))])
    rows = [{"x": 1, "in": {"y": "a"}}, {"x": None, "in": None}, None]
    table = pa.table({"a.b": [1, 2, 3], "s": pa.array(rows, kind), "z": [7, 8, 9]})
    found = of(tmp_path, table)
    assert found["minValues"] == {"a.b": 1, "s": {"x": 1, "in": {"y": "a"}}, "z": 7}
    assert found["nullCount"] == {"a.b": 0, "s": {"x": 2, "in": {"y": 2}}, "z": 0}


def test_partition_columns_have_none(tmp_path: Path) -> None:
    found = of(tmp_path, pa.table({"p": ["a"], "v": [1]}), partition_by=["p"])
    assert found["minValues"] == {"v": 1}


@pytest.mark.parametrize(
    ("properties", "names"),
    [
        ({}, [f"c{number}" for number in range(32)]),
        ({"delta.dataSkippingNumIndexedCols": "2"}, ["c0", "c1"]),
        ({"delta.dataSkippingNumIndexedCols": "0"}, []),
        ({"delta.dataSkippingNumIndexedCols": "-1"}, [f"c{number}" for number in range(40)]),
        ({"delta.dataSkippingStatsColumns": "c39, `c3`"}, ["c3", "c39"]),
    ],
)
def test_properties_of_the_table(
    tmp_path: Path, properties: dict[str, str], names: list[str]
) -> None:
    table = pa.table({f"c{number}": [number] for number in range(40)})
    found = of(tmp_path, table, table_properties=properties)
    assert list(found.get("minValues", {})) == names
    assert list(found.get("nullCount", {})) == names
    assert found["numRecords"] == 1


def test_the_property_counts_fields_of_structs() -> None:
    schema = pa.schema([("s", pa.struct([("x", pa.int64()), ("y", pa.int64())])), ("z", pa.int8())])
    two = indexed_columns(schema, (), {"delta.dataSkippingNumIndexedCols": "2"})
    assert two == {"s": {"x": pa.int64(), "y": pa.int64()}}
    named = indexed_columns(schema, (), {"delta.dataSkippingStatsColumns": "s"})
    assert named == two
    assert indexed_columns(schema, ["z"], {}) == two


def test_several_row_groups(tmp_path: Path) -> None:
    table = pa.table({"v": pa.array(range(1_200_000)), "n": pa.nulls(1_200_000, pa.int64())})
    uri = str(tmp_path / "t")
    sink = committer(uri)
    files = ArrowBatchWriter(None, uri, threads=1).write(Batch("b", (), table))
    sink.ensure(files.output_schema)
    sink.land(files, [entry("s", 1)])
    (found,) = statistics(uri)
    assert bounds(found, "v") == (0, 1_199_999, 0)
    assert bounds(found, "n") == (None, None, 1_200_000)


# -- readers


DAYS = [dt.datetime(2026, 1, 1 + number, tzinfo=dt.UTC) for number in range(8)]


def daily(number: int) -> pa.Table:
    """The file of a day."""
    return pa.table(
        {
            "id": pa.array([number * 10 + one for one in range(10)]),
            "at": pa.array([DAYS[number]] * 10, pa.timestamp("us", "UTC")),
            "local": pa.array([DAYS[number].replace(tzinfo=None)] * 10, pa.timestamp("us")),
            "day": pa.array([DAYS[number].date()] * 10),
            "name": [f"{'x' * 40}{number}{one}" for one in range(10)],
            "key": [f"{number}-{one}" for one in range(10)],
            "price": pa.array([Decimal(number)] * 10, pa.decimal128(10, 2)),
            "s": pa.array([{"x": number}] * 10),
        }
    )


FILTERS = [
    (pc.field("id") == 35, 1, 1),
    (pc.field("id") >= 65, 2, 15),
    (pc.field("at") == DAYS[2], 1, 10),
    (pc.field("local") == DAYS[2].replace(tzinfo=None), 1, 10),
    (pc.field("day") < DAYS[1].date(), 1, 10),
    (pc.field("key") == "4-2", 1, 1),
    (pc.field("price") == Decimal("3.00"), 1, 10),
    (pc.field("name") == f"{'x' * 40}34", 8, 1),
]


@pytest.fixture(scope="module")
def table_of_days(tmp_path_factory: pytest.TempPathFactory) -> DeltaTable:
    uri = str(tmp_path_factory.mktemp("days") / "t")
    write(uri, *(daily(number) for number in range(8)))
    return DeltaTable(uri)


@pytest.mark.parametrize(("condition", "files", "rows"), FILTERS, ids=str)
def test_a_reader_skips_files(
    table_of_days: DeltaTable, condition: pc.Expression, files: int, rows: int
) -> None:
    dataset = table_of_days.to_pyarrow_dataset()
    assert len(list(dataset.get_fragments())) == 8
    assert len(list(dataset.get_fragments(filter=condition))) == files
    assert dataset.to_table(filter=condition).num_rows == rows


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("id = 35", 1),
        ("at = '2026-01-03T00:00:00Z'", 10),
        ("local = '2026-01-03T00:00:00'", 10),
        ("day = '2026-01-03'", 10),
        ("price = 3.00", 10),
        ("s['x'] = 3", 10),
        (f"name = '{'x' * 40}34'", 1),
    ],
)
def test_a_query_reads_all_rows_that_fit(
    table_of_days: DeltaTable, condition: str, rows: int
) -> None:
    query = QueryBuilder().register("t", table_of_days)
    found = pa.table(query.execute(f"SELECT id FROM t WHERE {condition}").read_all())
    assert found.num_rows == rows


def test_an_announced_batch_and_a_compaction_keep_them(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    write(uri, daily(0))
    sink = committer(uri)
    writer = ArrowBatchWriter(None, uri)
    announce(sink, writer.write(Batch("b", (), daily(1))).files, entry("a", 1))
    contend(sink)
    written = writer.write(Batch("b", (), daily(2)))
    assert sink.land(written, [entry("s", 2, seq(1))]).version is not None
    assert [one["minValues"]["id"] for one in statistics(uri)] == [0, 20, 10]
    compact(uri)
    assert statistics(uri)[-1]["minValues"]["id"] == 0
    assert statistics(uri)[-1]["maxValues"]["id"] == 29


# -- values of another writer


INDEXED = {
    "i": pa.int32(),
    "f": pa.float64(),
    "t": pa.string(),
    "d": pa.date32(),
    "at": pa.timestamp("us", "UTC"),
    "s": {"x": pa.int64()},
}


@pytest.mark.parametrize(
    "values",
    [
        {"i": 2**31},
        {"i": "1"},
        {"i": True},
        {"f": "NaN"},
        {"f": True},
        {"t": 1},
        {"t": "a" * 33},
        {"d": "2026-13-01"},
        {"d": "2026-01-01T00:00:00.000Z"},
        {"at": "2026-01-01T00:00:00.000"},
        {"at": "2026-01-01T25:00:00.000Z"},
        {"at": 5},
        {"s": 1},
        {"s": {"x": {}}},
        {"s": {"y": 1}},
        {"unknown": 1},
        {"i": None},
    ],
)
def test_a_value_that_does_not_fit_is_left_out(values: dict[str, Any]) -> None:
    given = json.dumps({"minValues": values, "maxValues": values, "nullCount": values})
    found = json.loads(log_statistics(3, given, INDEXED))
    assert set(found) <= {"numRecords", "nullCount"}
    assert found["numRecords"] == 3


@pytest.mark.parametrize(
    "given",
    ["", "no", "[]", '{"minValues": 1}', '{"nullCount": {"i": 4}}', "[" * 100_000, '"\ud800"'],
)
def test_statistics_that_are_none(given: str) -> None:
    assert json.loads(log_statistics(3, given, INDEXED)) == {"numRecords": 3}
