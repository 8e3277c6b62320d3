"""Rows of a Delta table, read without threads that call Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from kcl_pipeline.delta.dead_letters import read_rows

PACKAGE = Path(__file__).parents[2] / "kcl_pipeline"
COUNT = """
import sys
from deltalake import DeltaTable
from kcl_pipeline.delta.dead_letters import read_rows
print(read_rows(DeltaTable(sys.argv[1]), "select sum(n) as n from rows")["n"][0])
"""


def test_a_query_returns_its_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    for n in range(3):
        write_deltalake(uri, pa.table({"n": [n, n + 10], "s": ["a", None]}), mode="append")
    found = read_rows(DeltaTable(uri), "select n, s from rows where s is not null order by n")
    assert found.to_pylist() == [{"n": n, "s": "a"} for n in range(3)]


@pytest.mark.parametrize(("waves", "count"), [(1, 2), pytest.param(5, 4, marks=pytest.mark.long)])
def test_a_process_that_ends_after_a_query_is_not_aborted(
    tmp_path: Path, waves: int, count: int
) -> None:
    """With `to_pyarrow_table`, one process of five is aborted."""
    uri = str(tmp_path / "t")
    for _ in range(6):
        write_deltalake(uri, pa.table({"n": list(range(100))}), mode="append")
    for _ in range(waves):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", COUNT, uri], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for _ in range(count)
        ]
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out.split()) == (0, [b"29700"]), err


def test_the_product_reads_tables_with_queries() -> None:
    """The kit for tests keeps the order of rows, and its process goes on after a read."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if {"to_pyarrow_table(", "to_pyarrow_dataset(", "to_pandas("}
        & set(re.findall(r"to_p\w+\(", path.read_text()))
    }
    assert found == {"testing/pipelines.py"}
