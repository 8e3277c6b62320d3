"""Parquet files of batches with records of any size."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.delta.files import write_parquet


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
