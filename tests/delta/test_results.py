"""What a transform returns: which values and types are in the table, and which are dead letters.

Everything runs through a worker of the test kit. The table is read back with deltalake, pandas, and
the SQL engine of deltalake, and compacted.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.events import ShardPaused
from kcl_pipeline.testing import PipelineTest
from kcl_pipeline.worker.summary import StopReason

YEAR_1 = -62_135_596_800
END_OF_9999 = 253_402_300_799


def pipeline(transform: Callable[[pa.Table], pa.Table], **sink) -> KinesisPipeline:
    return KinesisPipeline(
        name="results",
        streams=["orders"],
        transform_arrow=transform,
        sink=DeltaSink("unused", **sink),
    )


def read_back(test: PipelineTest) -> list[dict]:
    """The rows by deltalake, after every reader has read them."""
    uri = test.pipeline.sink.uri
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    assert len(DeltaTable(uri).to_pandas()) == len(rows)
    found = QueryBuilder().register("t", DeltaTable(uri)).execute("select * from t").read_all()
    assert len(pa.table(found).to_pylist()) == len(rows)
    DeltaTable(uri).optimize.compact()
    assert len(DeltaTable(uri).to_pyarrow_table().to_pylist()) == len(rows)
    return rows


def not_utf8(*values: bytes | None) -> pa.Array:
    data = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(data), data.buffers(), data.null_count)


def out_of_precision() -> pa.Array:
    wide = pa.array([Decimal("1.00"), Decimal("123456.00")], pa.decimal128(20, 2))
    return pa.Array.from_buffers(pa.decimal128(5, 2), 2, wide.buffers())


def out_of_precision_256() -> pa.Array:
    wide = pa.array([Decimal(1), Decimal(10) ** 40], pa.decimal256(76, 0))
    return pa.Array.from_buffers(pa.decimal256(38, 0), 2, wide.buffers())


def view_not_utf8() -> pa.Array:
    views = pa.array([b"a", b"\xff" * 20], pa.binary_view())
    return pa.Array.from_buffers(pa.string_view(), 2, views.buffers())


def nested(values: pa.Array, fields: str = "x") -> pa.Array:
    return pa.StructArray.from_arrays([values], [fields])


def listed(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), values)


UINT = pa.array([1, 2**63], pa.uint64())
SECONDS = pa.array([0, 10**15], pa.timestamp("s"))
MICROS = pa.array([0, (END_OF_9999 + 1) * 10**6], pa.timestamp("us", "UTC"))
DAYS = pa.array([0, 2_932_897], pa.int32()).view(pa.date32())
TEXT = not_utf8(b"caf\xc3\xa9", b"caf\xe9\x1b[2J" + b"x" * 500)

BAD = {
    "uint64": UINT,
    "uint64_list": listed(UINT),
    "uint64_dictionary": pa.DictionaryArray.from_arrays([0, 1], UINT),
    "uint64_runs": pc.run_end_encode(UINT),
    "seconds": SECONDS,
    "seconds_zone": pa.array([0, -(10**15)], pa.timestamp("s", "Europe/Berlin")),
    "millis": pa.array([0, 10**18], pa.timestamp("ms", "UTC")),
    "millis_struct": nested(pa.array([0, 10**18], pa.timestamp("ms"))),
    "micros": MICROS,
    "micros_before": pa.array([0, YEAR_1 * 10**6 - 1], pa.timestamp("us")),
    "micros_list": listed(MICROS),
    "micros_deep": nested(listed(nested(MICROS))),
    "day": DAYS,
    "day_before": pa.array([0, -719_163], pa.int32()).view(pa.date32()),
    "day_millis": pa.array([0, 2**62], pa.int64()).view(pa.date64()),
    "day_map": pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), DAYS),
    "text": TEXT,
    "text_surrogate": not_utf8(b"", b"\xed\xa0\x80"),
    "text_large": pa.Array.from_buffers(
        pa.large_string(), 2, pa.array([b"a", b"\xff"], pa.large_binary()).buffers()
    ),
    "text_view": view_not_utf8(),
    "text_list": listed(TEXT),
    "text_struct": nested(TEXT),
    "text_key": pa.MapArray.from_arrays([0, 1, 2], TEXT, pa.array([1, 2])),
    "text_dictionary": pa.DictionaryArray.from_arrays([0, 1], TEXT),
    "decimal": out_of_precision(),
    "decimal_256": out_of_precision_256(),
}


def rows_of(records: pa.Table) -> list[dict]:
    return [json.loads(one) for one in records["data"].to_pylist()]


def chosen(values: pa.Array, picked: list[int]) -> pa.ChunkedArray:
    """Values at these places, also of types that pyarrow does not take from."""
    return pa.chunked_array([values.slice(at, 1) for at in picked], values.type)


def with_bad(records: pa.Table) -> pa.Table:
    rows = rows_of(records)
    return pa.table(
        {
            "id": [row["id"] for row in rows],
            **{
                name: chosen(values, [int(row["bad"] == name) for row in rows])
                for name, values in BAD.items()
            },
        }
    )


@pytest.mark.parametrize("is_new", [True, False])
def test_each_value_that_no_table_holds_is_a_dead_letter_and_the_others_land(is_new: bool):
    with PipelineTest(pipeline(with_bad), shards=2) as test:
        if not is_new:
            test.put({"id": "first", "bad": None})
            test.run()
        good = [f"good{n}" for n in range(60)]
        for name in good:
            test.put({"id": name, "bad": None})
        for name in BAD:
            test.put({"id": f"bad {name}", "bad": name})
        test.run()
        assert {row["id"] for row in read_back(test)} == {*good, *([] if is_new else ["first"])}
        letters = {json.loads(one["data"])["bad"]: one["error"] for one in test.dead_letters()}
        assert letters.keys() == BAD.keys()
        assert [error for name, error in letters.items() if f"column {name}" not in error] == []
        assert all(error.isprintable() and len(error) < 200 for error in letters.values())
        assert letters["uint64"] == "column uint64: 9223372036854775808 does not fit bigint"
        assert letters["seconds"] == (
            f"column seconds: {10**15} s since 1970 does not fit timestamp_ntz"
        )
        assert letters["micros_deep"].startswith("column micros_deep.x.element.x: 2534023008")
        shown = r"b'caf\xe9\x1b[2J" + "x" * 64
        assert letters["text"] == f"column text: {shown}... is not UTF-8"


NOON = dt.datetime(2026, 5, 4, 12, 0, 0, 123456, dt.UTC)
GOOD = {
    "null": (pa.nulls(2), None),
    "bool": (pa.array([True, None]), True),
    **{
        f"int{bits}": (pa.array([-(2 ** (bits - 1)), None], f"int{bits}"), -(2 ** (bits - 1)))
        for bits in (8, 16, 32, 64)
    },
    **{
        f"uint{bits}": (
            pa.array([2 ** min(bits, 63) - 1, None], f"uint{bits}"),
            2 ** min(bits, 63) - 1,
        )
        for bits in (8, 16, 32, 64)
    },
    "float16": (pa.array([1.5, None], pa.float16()), 1.5),
    "float32": (pa.array([1.5, None], pa.float32()), 1.5),
    "float64": (pa.array([float("inf"), None]), float("inf")),
    "string": (pa.array(["ü", None]), "ü"),
    "large_string": (pa.array(["ü", None], pa.large_string()), "ü"),
    "string_view": (pa.array(["ü" * 20, None], pa.string_view()), "ü" * 20),
    "binary": (pa.array([b"\xff", None]), b"\xff"),
    "large_binary": (pa.array([b"\xff", None], pa.large_binary()), b"\xff"),
    "binary_view": (pa.array([b"\xff" * 20, None], pa.binary_view()), b"\xff" * 20),
    "fixed_binary": (pa.array([b"ab", None], pa.binary(2)), b"ab"),
    "date32": (pa.array([dt.date(1, 1, 1), None]), dt.date(1, 1, 1)),
    "date64": (pa.array([dt.date(9999, 12, 31), None], pa.date64()), dt.date(9999, 12, 31)),
    "first": (pa.array([YEAR_1, None], pa.timestamp("s")), dt.datetime(1, 1, 1)),  # noqa: DTZ001
    "last": (
        pa.array([END_OF_9999 * 10**6 + 999_999, None], pa.timestamp("us", "UTC")),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, dt.UTC),
    ),
    "millis": (
        pa.array([NOON, None], pa.timestamp("ms", "+05:30")),
        NOON.replace(microsecond=123_000),
    ),
    "nanos": (
        pa.array([1_999, None], pa.timestamp("ns", "UTC")),
        dt.datetime(1970, 1, 1, 0, 0, 0, 1, dt.UTC),
    ),
    "decimal32": (pa.array([Decimal("1.50"), None], pa.decimal32(5, 2)), Decimal("1.50")),
    "decimal64": (pa.array([Decimal("1.50"), None], pa.decimal64(12, 2)), Decimal("1.50")),
    "decimal128": (pa.array([Decimal("9" * 38), None], pa.decimal128(38, 0)), Decimal("9" * 38)),
    "decimal256": (pa.array([Decimal("1.50"), None], pa.decimal256(38, 2)), Decimal("1.50")),
    "decimal_negative_scale": (
        pa.array([Decimal(1200), None], pa.decimal128(5, -2)),
        Decimal(1200),
    ),
    "dictionary": (pa.array(["a", None]).dictionary_encode(), "a"),
    "dictionary_view": (
        pa.DictionaryArray.from_arrays(
            pa.array([1, None], pa.uint32()), pa.array(["b", "a"], pa.string_view())
        ),
        "a",
    ),
    "runs": (pc.run_end_encode(pa.array(["a", None])), "a"),
    "list": (pa.array([["a", None], None]), ["a", None]),
    "large_list": (pa.array([["a"], None], pa.large_list(pa.large_string())), ["a"]),
    "fixed_list": (pa.array([["a", "b"], None], pa.list_(pa.string(), 2)), ["a", "b"]),
    "list_view": (pa.array([["a"], None], pa.list_view(pa.string_view())), ["a"]),
    "large_list_view": (pa.array([["a"], None], pa.large_list_view(pa.string())), ["a"]),
    "list_dictionary": (
        pa.ListArray.from_arrays(
            pa.array([0, None, 2], pa.int32()), pa.array(["a", "a"]).dictionary_encode()
        ),
        ["a", "a"],
    ),
    "list_empty": (pa.array([[], None], pa.list_(pa.int64())), []),
    "struct": (pa.array([{"a": 1}, None]), {"a": 1}),
    "struct_nanos": (
        pa.array([{"a": 1_999}, None], pa.struct([("a", pa.timestamp("ns", "UTC"))])),
        {"a": dt.datetime(1970, 1, 1, 0, 0, 0, 1, dt.UTC)},
    ),
    "struct_unsigned": (pa.array([{"a": 7}, None], pa.struct([("a", pa.uint16())])), {"a": 7}),
    "map": (pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())), [("a", 1)]),
    "map_nested": (
        pa.array(
            [[("a", [{"b": 1}])], None],
            pa.map_(pa.large_string(), pa.list_(pa.struct([("b", pa.uint8())]))),
        ),
        [("a", [{"b": 1}])],
    ),
    "extension": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16))),
        b"0" * 16,
    ),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8())), 1),
    "json": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None])), "{}"),
}


@pytest.mark.parametrize("name", ["slices", "whole"])
def test_types_of_arrow_are_written_in_those_of_delta_and_read_by_all(name: str):
    def typed(records: pa.Table) -> pa.Table:
        rows = [int(row["n"]) % 2 for row in rows_of(records)]
        columns = {
            kind: chosen(values, rows) if name == "slices" else values.slice(0, len(rows))
            for kind, (values, _) in GOOD.items()
            if kind != "null"
        }
        return pa.table({"n": rows, **columns})

    with PipelineTest(pipeline(typed)) as test:
        test.put(*({"n": n} for n in range(2)))
        test.run()
        assert test.dead_letters() == []
        [full, empty] = sorted(read_back(test), key=lambda row: row["n"])
        assert {kind: full[kind] for kind in full if kind != "n"} == {
            kind: value for kind, (_, value) in GOOD.items() if kind != "null"
        }
        assert {kind: value for kind, value in empty.items() if value is not None} == {"n": 1}


REFUSED = {
    "duration": pa.array([1, 2], pa.duration("us")),
    "time": pa.array([1, 2], pa.time64("us")),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
    "union": pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])]),
    "decimal": pa.array([Decimal(1), None], pa.decimal256(60, 0)),
    "list": pa.array([[1], []], pa.list_(pa.duration("s"))),
    "empty": pa.array([{}, {}], pa.struct([])),
    "nulls": pa.array([None, None]),
    "null_list": pa.array([[], [None]]),
    "null_field": pa.array([{"a": None}, None]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_no_table_has_pauses_the_shards_with_a_sentence(name: str):
    values = [REFUSED[name]]

    def typed(records: pa.Table) -> pa.Table:
        rows = list(range(records.num_rows))
        return pa.table({"n": rows, "v": chosen(values[0], [n % 2 for n in rows])})

    with PipelineTest(pipeline(typed)) as test:
        test.put({"n": 1}, {"n": 2})
        assert test.run().reason is StopReason.FAILED
        [reason] = {one.reason for one in test.events.of(ShardPaused)}
        assert re.search(r"\bv\b", reason)
        assert test.pipeline.sink.uri in reason
        assert test.dead_letters() == []
        values[0] = pa.array(["fixed", "too"])
        test.run()
        assert sorted(row["v"] for row in read_back(test)) == ["fixed", "too"]


REQUIRED = {
    "flag": (pa.bool_(), True),
    "int8": (pa.int8(), 1),
    "int64": (pa.int64(), 2**63 - 1),
    "float32": (pa.float32(), 1.5),
    "amount": (pa.decimal128(5, 2), Decimal("1.25")),
    "text": (pa.string(), "ü"),
    "bytes": (pa.binary(), b"\xff"),
    "day": (pa.date32(), dt.date(2026, 1, 1)),
    "at": (pa.timestamp("us", "UTC"), NOON),
    "texts": (pa.list_(pa.string()), ["a", None]),
    "pairs": (pa.map_(pa.string(), pa.int32()), [("a", 1)]),
    "inner": (pa.struct([pa.field("y", pa.int32(), False)]), {"y": 1}),
}


def test_a_struct_may_be_null_whose_fields_may_not():
    """pyarrow does not write a null of such a field, although a null struct hides it."""
    kind = pa.struct([pa.field(name, kind, False) for name, (kind, _) in REQUIRED.items()])
    full = {name: value for name, (_, value) in REQUIRED.items()}
    loose = pa.struct([field.with_nullable(True) for field in kind])

    def typed(records: pa.Table) -> pa.Table:
        rows = rows_of(records)
        values = [
            full | ({row["bad"]: None} if row["bad"] else {}) if row["has"] else None
            for row in rows
        ]
        return pa.table({"id": [row["id"] for row in rows], "v": pa.array(values, loose)})

    with PipelineTest(pipeline(typed)) as test:
        fields = [pa.field("id", pa.string()), pa.field("v", kind)]
        DeltaTable.create(test.pipeline.sink.uri, pa.schema(fields))
        for part in range(2):
            for number in range(20):
                test.put({"id": f"{part} {number}", "has": number % 3, "bad": None})
            for name in REQUIRED:
                test.put({"id": f"{part} {name}", "has": 1, "bad": name})
            test.run()
        rows = {row["id"]: row["v"] for row in read_back(test)}
        assert rows == {
            f"{part} {number}": full if number % 3 else None
            for part in range(2)
            for number in range(20)
        }
        letters = {json.loads(one["data"])["id"]: one["error"] for one in test.dead_letters()}
        assert letters == {
            f"{part} {name}": f"column v.{name} is null, and the table does not allow null"
            for part in range(2)
            for name in REQUIRED
        }
