"""The files of a partitioned table are in folders `column=value`, from which polars reads them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from kcl_pipeline import DeltaSink
from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.maintenance import compact, vacuum
from kcl_pipeline.delta.sink import is_batch_file
from kcl_pipeline.errors import TransformFailedError
from tests.support.delta_tables import Committer, entry, seq

TEXTS = ["plain", "a b/%20=c?#&", "ü\U0001f600", "..", "line\nend\t", "~!*'()[]{}|", None]
BY = ("text", "k=%/ü")


def table_of(texts: list[str | None]) -> pa.Table:
    rows = range(len(texts))
    return pa.table({"n": rows, "text": pa.array(texts, pa.string()), BY[1]: [n % 2 for n in rows]})


def landed(uri: str, *batches: pa.Table, by: tuple[str, ...] = BY) -> None:
    sink = Committer(DeltaSink(uri, by), "app")
    for number, rows in enumerate(batches):
        written = ArrowBatchWriter(None, uri, by).write(Batch("b", (), rows))
        sink.ensure(written.output_schema)
        outcome = sink.land(written, [entry("a", number + 1, seq(number))])
        assert outcome.version is not None


def rows_of(uri: str) -> list[dict]:
    table = DeltaTable(uri)
    rows = table.to_pyarrow_table().sort_by("n").to_pylist()
    found = QueryBuilder().register("t", table).execute("select * from t order by n").read_all()
    names = [field.name for field in table.schema().fields]
    assert pa.table(found).select(names).to_pylist() == [
        {name: row[name] for name in names} for row in rows
    ]
    return [{name: row[name] for name in ("n", *BY)} for row in rows]


def folders_of(uri: str) -> set[str]:
    files = [file.relative_to(uri) for file in Path(uri).glob("batches/**/*.parquet")]
    return {"/".join(file.parts[2:-1]) for file in files}


def test_the_folders_have_the_values_encoded_as_in_a_url(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    landed(uri, table_of(["2026-05-04", "a b/%=~", "ü", None]))
    assert folders_of(uri) == {
        "text=2026-05-04/k%3D%25%2F%C3%BC=0",
        "text=a%20b%2F%25%3D%7E/k%3D%25%2F%C3%BC=1",
        "text=%C3%BC/k%3D%25%2F%C3%BC=0",
        "text=__HIVE_DEFAULT_PARTITION__/k%3D%25%2F%C3%BC=1",
    }


@pytest.mark.parametrize("text", ["x" * 251, "ü" * 42])
def test_a_value_that_is_too_long_for_a_folder_is_refused(tmp_path: Path, text: str) -> None:
    uri = str(tmp_path / "t")
    with pytest.raises(TransformFailedError, match=r"column text: b'.*[.]{3} is too long for a"):
        landed(uri, table_of(["short", text]))
    landed(uri, table_of(["short", text[:-1]]))
    assert [row["text"] for row in rows_of(uri)] == ["short", text[:-1]]
    compact(uri)


def test_values_that_are_too_long_together_have_no_folders(tmp_path: Path) -> None:
    uri, by = str(tmp_path / "t"), ("a", "b", "c")
    rows = pa.table({"n": [0], **{name: [name * 200] for name in by}})
    landed(uri, rows, by=by)
    assert folders_of(uri) == {""}
    assert DeltaTable(uri).to_pyarrow_table().select(rows.column_names).to_pylist() == (
        rows.to_pylist()
    )


def test_compact_and_vacuum_keep_the_files_of_the_table_and_find_the_others(
    tmp_path: Path,
) -> None:
    uri = str(tmp_path / "t")
    given = table_of(TEXTS)
    landed(uri, given, given)
    expected = [row for row in given.to_pylist() for _ in range(2)]
    ArrowBatchWriter(None, uri, BY).write(Batch("abandoned", (), given))
    assert rows_of(uri) == expected
    for file in Path(uri).glob("batches/**/*.parquet"):
        os.utime(file, (0, 0))
    removed = vacuum(uri, 1)
    assert len(removed) == given.num_rows
    assert all(name.startswith("batches/abandoned-") for name in removed)
    assert rows_of(uri) == expected
    assert list(Path(uri).glob("batches/abandoned-*/**/*.parquet")) == []
    assert compact(uri).files_removed == 2 * given.num_rows
    assert rows_of(uri) == expected


def test_the_files_can_be_announced(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    written = ArrowBatchWriter(None, uri, BY).write(Batch("b", (), table_of(TEXTS)))
    names = {re.findall("[0-9a-f]{32}", file.path)[0] for file in written.files}
    assert len(names) == 1
    assert all(is_batch_file(file.path, *names) for file in written.files)
