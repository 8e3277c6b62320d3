"""Parquet files of batches with records of any size."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.delta.files import TableLayout, partition_value, write_parquet


def table_of(sizes: list[int]) -> pa.Table:
    return pa.table(
        {
            "sequence_number": [str(10**55 + i) for i in range(len(sizes))],
            "data": pa.array([bytes([i % 251]) * size for i, size in enumerate(sizes)]),
        }
    )


def written(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    write_parquet(table, sink)
    return pq.read_table(pa.BufferReader(sink.getvalue()))


@pytest.mark.parametrize(
    "sizes", [[], [0], [0] * 5000, [1024] * 600, [10 * 2**20, 1, 10 * 2**20], [3, 300_000, 7] * 20]
)
def test_a_file_has_every_row_in_order(sizes: list[int]) -> None:
    table = table_of(sizes)
    assert written(table).equals(table.cast(written(table).schema))


@pytest.mark.parametrize(
    ("size", "least", "most"),
    [(0, 2048, 2048), (100, 2048, 2048), (1024, 900, 1024), (10 * 2**20, 1, 1)],
)
def test_rows_are_encoded_in_portions_and_pages_of_one_megabyte(
    monkeypatch: pytest.MonkeyPatch, size: int, least: int, most: int
) -> None:
    asked: list[int] = []
    write = pq.write_table

    def noting(*args: Any, **options: Any) -> None:
        asked.append(options["write_batch_size"])
        assert options["data_page_size"] == 2**20
        write(*args, **options)

    monkeypatch.setattr(pq, "write_table", noting)
    table = table_of([size] * 4)
    written(pa.concat_tables([table, table]).slice(3, 2))
    assert least <= asked[0] <= most


def test_repeating_texts_below_a_struct_list_or_map_have_a_dictionary() -> None:
    rows = range(20_000)
    table = pa.table(
        {
            "user": pa.array([{"name": f"user-{row % 7}"} for row in rows]),
            "tags": pa.array([[f"tag-{row % 5}"] for row in rows]),
        }
    )
    sink = pa.BufferOutputStream()
    assert write_parquet(table, sink)[0] < 3_000, "it was 18,493 bytes without"
    group = pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    assert {one.path_in_schema for one in columns if one.has_dictionary_page} == {
        "user.name",
        "tags.list.element",
    }
    assert written(table).equals(table.cast(written(table).schema))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "2026-01-02T00:00:00Z"),
        (dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC), "2026-01-02T03:04:05.000006Z"),
        (dt.datetime(1, 1, 1, tzinfo=dt.UTC), "0001-01-01T00:00:00Z"),
        (dt.datetime(2026, 1, 2), "2026-01-02 00:00:00"),  # noqa: DTZ001
        (dt.datetime(999, 1, 2, 3, 4, 5, 6), "0999-01-02 03:04:05.000006"),  # noqa: DTZ001
    ],
)
def test_an_instant_in_the_log_names_its_zone(value: dt.datetime, text: str) -> None:
    assert partition_value(value) == text
    kind = pa.timestamp("us", None if value.tzinfo is None else "UTC")
    assert TableLayout("", {"at": kind}).problem({"at": text}) is None
