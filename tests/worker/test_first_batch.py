"""The first batch of a new table is written once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from kcl_pipeline.delta.files import ArrowBatchWriter
from tests.support.first_batch import FirstBatch

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def first(tmp_path: Path) -> FirstBatch:
    return FirstBatch(tmp_path / "table", lambda uri: ArrowBatchWriter(None, uri))


def test_the_first_batch_is_written_once(tmp_path: Path) -> None:
    batch = first(tmp_path)
    batch.commit(ROWS)
    assert batch.writes == 1
    assert batch.files() == (1, 1)


def test_files_that_were_removed_before_the_table_is_created_are_written_again(
    tmp_path: Path,
) -> None:
    """Somebody removes the folder of a former table."""
    batch = first(tmp_path)
    batch.commit(ROWS, before=batch.remove)
    assert batch.writes == 2
    assert batch.files() == (1, 1)
