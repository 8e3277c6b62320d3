"""The first batch of a new table is written once, and the files of tasks have statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from kcl_pipeline.batch import Batch
from kcl_pipeline.spark import writer
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.writer import SparkBatchWriter, records_frame
from tests.support.first_batch import FirstBatch
from tests.support.spark_batches import records


@pytest.fixture(params=["in memory", "by tasks"])
def session(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> SparkSession:
    if request.param == "by tasks":
        monkeypatch.setattr(ArrowMemory, "prepare", lambda _self: False)
    return spark


def test_the_first_batch_is_written_once(session: SparkSession, tmp_path: Path) -> None:
    batch = FirstBatch(tmp_path / "t", lambda uri: SparkBatchWriter(session, None, uri))
    batch.commit(records(b"a", b"b", b"c"))
    assert batch.writes == 1
    on_disk, in_table = batch.files()
    assert on_disk == in_table > 0


def test_files_that_tasks_write_have_statistics(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "can_share_memory", lambda _session: False)
    batch = Batch("b", (), records(*[f"r-{n}".encode() for n in range(20)]))
    frame = records_frame(spark, batch.records)
    task_writer = SparkBatchWriter(spark, None, str(tmp_path))
    written = task_writer.write_frame(frame.repartition(2, "sequence_number"), batch, None)
    assert len(written.files) == 2
    for file in written.files:
        column = pq.read_table(tmp_path / file.path)["partition_key"]
        found = json.loads(file.statistics)
        assert found["minValues"]["partition_key"] == pc.min(column).as_py()
        assert found["maxValues"]["partition_key"] == pc.max(column).as_py()
        assert found["nullCount"]["partition_key"] == 0
