"""Results against the columns of a table: NOT NULL, other types, new columns, partitions."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from kcl_pipeline.events import ShardPaused
from kcl_pipeline.testing import PipelineTest
from kcl_pipeline.worker.summary import StopReason
from tests.delta.test_results import pipeline, read_back, rows_of


def inferred(records: pa.Table) -> pa.Table:
    """Types as pyarrow infers them from the values of a batch."""
    return pa.Table.from_pylist(rows_of(records))


def by_id(test: PipelineTest) -> dict:
    return {row["id"]: {k: v for k, v in row.items() if k != "id"} for row in read_back(test)}


def letters(test: PipelineTest) -> list[str]:
    return [one["error"] for one in test.dead_letters()]


def test_a_type_that_fits_no_record_pauses_the_shards_until_it_is_fixed():
    with PipelineTest(pipeline(inferred), shards=2) as test:
        test.put({"id": "a", "v": 1})
        test.run()
        test.put(*({"id": f"b{n}", "v": n + 0.5} for n in range(40)))
        assert test.run().reason is StopReason.FAILED
        [reason] = {one.reason for one in test.events.of(ShardPaused)}
        assert reason == (
            f"the transform's output does not fit {test.pipeline.sink.uri}: v is double in the "
            "output and bigint in the table"
        )
        assert by_id(test).keys() == {"a"}
        assert letters(test) == []
        test.put(*({"id": f"c{n}", "v": n} for n in range(400)))
        test.run()
        assert len(test.dead_letters()) == 40, "of 440, these are records with another type"
        assert by_id(test).keys() == {"a", *(f"c{n}" for n in range(400))}


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [
        (["x"], pa.array([dt.time(1)]), "v is time64[us] in the output and string in the table"),
        (
            [1],
            pa.array([dt.timedelta(1)]),
            "v is duration[us] in the output and bigint in the table",
        ),
        (
            [Decimal("1.5")],
            pa.array([Decimal("1" * 50)]),
            "v is decimal256(50, 0) in the output and decimal128(2, 1) in the table",
        ),
        (
            [[{"x": "a"}]],
            pa.array([[{"x": dt.time(1)}]]),
            "v.element.x is time64[us] in the output and string in the table",
        ),
        ([1], pa.array([[]]), "v is list<item: null> in the output and bigint in the table"),
        ([1], pa.array([{}]), "v is struct<> in the output and bigint in the table"),
    ],
)
def test_a_type_that_delta_does_not_have_is_no_null_in_the_table(first, then, reason: str):
    given = [pa.array(first), then]

    def typed(records: pa.Table) -> pa.Table:
        [number] = [row["n"] for row in rows_of(records)]
        return pa.table({"id": [number], "v": given[number]})

    with PipelineTest(pipeline(typed)) as test:
        test.put({"n": 0})
        test.run()
        test.put({"n": 1})
        assert test.run().reason is StopReason.FAILED
        assert test.events.of(ShardPaused)[0].reason.endswith(reason)
        assert by_id(test) == {0: {"v": first[0]}}


def test_a_paused_worker_goes_on_when_the_table_is_changed():
    with PipelineTest(pipeline(inferred)) as test:
        test.put({"id": "a"})
        test.run()
        test.put({"id": "b", "new": "x"})
        assert test.run().reason is StopReason.FAILED
        pause = test.events.of(ShardPaused)[0]
        assert "new (string) is not in the table; set schema_evolution=True" in pause.reason
        new = Field("new", PrimitiveType("string"))
        DeltaTable(test.pipeline.sink.uri).alter.add_columns([new])
        assert test.run().reason is StopReason.DRAINED
        assert by_id(test) == {"a": {"new": None}, "b": {"new": "x"}}


def test_records_with_another_type_are_dead_letters_and_numbers_are_widened():
    with PipelineTest(pipeline(inferred)) as test:
        test.put({"id": "a", "whole": 1, "real": 1.5, "deep": [{"x": 1.5}]})
        test.run()
        good = {"id": "b", "whole": 2, "real": 2, "deep": [{"x": 2}, {}]}
        test.put(
            good,
            {"id": "c", "whole": 2.5, "real": 2},
            {"id": "d", "whole": 3, "real": 2**53 + 1},
            {"id": "e", "whole": 3, "real": None, "deep": [{"y": 1}]},
            {"id": "f", "whole": None, "real": 3, "deep": []},
        )
        test.run()
        assert by_id(test) == {
            "a": {"whole": 1, "real": 1.5, "deep": [{"x": 1.5}]},
            "b": {"whole": 2, "real": 2.0, "deep": [{"x": 2.0}, {"x": None}]},
            "f": {"whole": None, "real": 3.0, "deep": []},
        }
        found = sorted(letters(test))
        assert len(found) == 3
        assert found[0] == "column real: 9007199254740993 does not fit double"
        assert found[1].endswith("deep.element.y is not in the table")
        assert found[2].endswith("whole is double in the output and bigint in the table")


NOT_NULL = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("v", pa.struct([pa.field("x", pa.int64(), nullable=False)])),
        pa.field("l", pa.list_(pa.field("element", pa.int64(), nullable=False))),
    ]
)


def test_null_is_a_failure_of_its_record_where_the_table_does_not_allow_it():
    def typed(records: pa.Table) -> pa.Table:
        return pa.Table.from_pylist(rows_of(records), NOT_NULL)

    with PipelineTest(pipeline(typed)) as test:
        DeltaTable.create(test.pipeline.sink.uri, NOT_NULL)
        test.put(
            {"id": "a", "v": {"x": 1}, "l": [1]},
            {"id": "b", "v": None, "l": None},
            {"id": None, "v": {"x": 1}, "l": []},
            {"id": "c", "v": {"x": None}, "l": []},
            {"id": "d", "v": {"x": 1}, "l": [1, None]},
        )
        test.run()
        assert by_id(test).keys() == {"a", "b"}
        why = "is null, and the table does not allow null"
        assert sorted(letters(test)) == [
            f"column id {why}",
            f"column l.element {why}",
            f"column v.x {why}",
        ]


INSTANT = dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC)
PARTITIONS = {
    "string": (pa.string(), ["ü/=% \n", "", None], ["ü/=% \n", None, None]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None], None),
    "instant": (pa.timestamp("us", "Europe/Berlin"), [INSTANT, None], None),
    "local": (pa.timestamp("us"), [INSTANT.replace(tzinfo=None), None], None),
    "decimal": (pa.decimal128(5, 2), [Decimal("1.50"), Decimal("-3.00")], None),
    "double": (pa.float64(), [1e300, float("inf"), -0.5], None),
    "flag": (pa.bool_(), [True, False, None], None),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition_values_are_read_as_they_were_written(name: str):
    kind, given, wanted = PARTITIONS[name]

    def typed(records: pa.Table) -> pa.Table:
        rows = [row["n"] for row in rows_of(records)]
        return pa.table({"id": rows, "p": pa.array([given[n] for n in rows], kind)})

    with PipelineTest(pipeline(typed, partition_by=["p"])) as test:
        test.put(*({"n": n} for n in range(len(given))))
        test.run()
        assert test.dead_letters() == []
        found = sorted(read_back(test), key=lambda row: row["id"])
        assert [row["p"] for row in found] == (wanted or given)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "why"),
    [
        (pa.date32(), 0, 2_932_897, "2932897 days since 1970 is outside of the years 1 to 9999"),
        (pa.timestamp("s", "UTC"), 0, 10**12, "1000000000000 s since 1970 is outside of the"),
        (pa.decimal128(5, 2), "0.50", "-0.50", "-0.50 is negative and not whole, which"),
        (pa.uint64(), 1, 2**63, "9223372036854775808 does not fit bigint"),
        (pa.string(), "x" * 253, "x" * 254, f"b'{'x' * 78}..."),
    ],
)
def test_a_partition_value_that_no_reader_reads_is_a_dead_letter(kind, good, bad, why):
    def typed(records: pa.Table) -> pa.Table:
        rows = rows_of(records)
        values = [bad if row["bad"] else good for row in rows]
        if pa.types.is_decimal(kind):
            column = pa.array([Decimal(one) for one in values], kind)
        elif pa.types.is_date(kind):
            column = pa.array(values, pa.int32()).view(kind)
        else:
            column = pa.array(values, kind)
        return pa.table({"id": [row["id"] for row in rows], "p": column})

    with PipelineTest(pipeline(typed, partition_by=["p"])) as test:
        test.put(*({"id": n, "bad": n == 3} for n in range(10)))
        test.run()
        assert len(read_back(test)) == 9
        [error] = letters(test)
        assert error.startswith(f"column p: {why}")


def test_with_schema_evolution_new_columns_are_added_and_others_filled():
    with PipelineTest(pipeline(inferred, schema_evolution=True)) as test:
        for row in ({"id": "a"}, {"id": "b", "new": {"x": 1}}, {"id": "c", "new": {}}):
            test.put(row)
            test.run()
        assert by_id(test) == {
            "a": {"new": None},
            "b": {"new": {"x": 1}},
            "c": {"new": {"x": None}},
        }


def test_an_error_that_quotes_foreign_bytes_is_escaped():
    def rejecting(records: pa.Table) -> pa.Table:
        data = records["data"].combine_chunks()
        text = pa.Array.from_buffers(pa.string(), len(data), data.buffers(), 0, data.offset)
        position = ["shard_id", "sequence_number", "sub_sequence_number"]
        return records.select(position).append_column("_error", text)

    with PipelineTest(pipeline(rejecting)) as test:
        test.put(b"caf\xe9 \x1b[2J\nand more")
        test.run()
        assert letters(test) == [r"caf\xe9 \x1b[2J"]
