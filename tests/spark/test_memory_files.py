"""Records that reach Spark's tasks as files in memory: the same rows and types as by
`createDataFrame`, all of them or an error, and nothing left behind.
"""

from __future__ import annotations

import datetime as dt
import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import TransformFailedError
from kcl_pipeline.spark import memory_files, writer
from kcl_pipeline.spark.memory_files import can_share_memory, frame_in_memory, in_memory
from kcl_pipeline.spark.writer import batch_frame, records_frame
from tests.spark.test_writer import records, spark_writer

GIVEN = records(*(bytes([number % 256]) * (number % 7) for number in range(1000)))
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.spark.test_memory_files import GIVEN
from kcl_pipeline.spark.memory_files import in_memory
with in_memory(GIVEN, 2, Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small batches are handed over, and not as Arrow."""
    monkeypatch.setattr(writer, "_MIN_FILE_BYTES", 1)
    monkeypatch.setattr(writer.ArrowMemory, "prepare", lambda _: False)


def temporary_files(spark) -> list[Path]:
    return sorted(Path(spark.sparkContext._temp_dir).glob("records-*"))


def open_files() -> int:
    """Those in memory: what other threads of the process open is their own."""
    gc.collect()  # writers of other tests keep files for their next batch
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if "memfd:" in str(link.readlink()):
                found.add(link.stat().st_ino)  # a mapping has a descriptor of its own
    return len(found)


def test_rows_types_and_what_may_be_null_are_those_of_the_other_way(spark) -> None:
    with frame_in_memory(spark, GIVEN, 2) as frame:
        assert frame.schema == records_frame(spark, GIVEN).schema
        assert frame.toArrow().cast(GIVEN.schema).sort_by("sequence_number").equals(GIVEN)
        assert frame.rdd.getNumPartitions() == 2
        assert (
            frame.where("data = X'0505050505'").count()
            == records_frame(spark, GIVEN).where("data = X'0505050505'").count()
            > 0
        )


def test_the_same_rows_when_they_are_read_again_and_afterwards_nothing_is_left(
    spark, tmp_path: Path, every_batch: None
) -> None:
    before = open_files()
    counted: list[int] = []

    def twice(frame):
        counted.extend([frame.count(), frame.count()])
        return frame.union(frame)

    written = spark_writer(spark, tmp_path, twice).write(Batch("b", (), GIVEN))
    assert (counted, written.rows) == ([1000, 1000], 2000)
    table = pa.concat_tables(pq.read_table(tmp_path / "t" / file.path) for file in written.files)
    assert sorted(table.column("sequence_number").to_pylist()) == sorted(
        GIVEN.column("sequence_number").to_pylist() * 2
    )
    assert temporary_files(spark) == []
    assert open_files() == before


def test_a_cached_frame_of_one_batch_is_not_taken_for_the_next(
    spark, tmp_path: Path, every_batch: None
) -> None:
    def keep(frame):
        return frame.cache()

    one = spark_writer(spark, tmp_path, keep)
    halves = [GIVEN.slice(0, 400), GIVEN.slice(400)]
    try:
        rows = [one.write(Batch("b", (), half)).rows for half in halves]
    finally:
        spark.catalog.clearCache()
    assert rows == [400, 600]


def test_a_transform_that_fails_leaves_nothing(spark, tmp_path: Path, every_batch: None) -> None:
    before = open_files()
    with pytest.raises(TransformFailedError, match="no good"):
        spark_writer(
            spark,
            tmp_path,
            lambda frame: frame.selectExpr("cast(raise_error('no good') AS string) AS x"),
        ).write(Batch("b", (), GIVEN))
    assert temporary_files(spark) == []
    assert open_files() == before


def test_a_batch_goes_the_other_way_when_spark_does_not_see_the_files(
    spark, monkeypatch: pytest.MonkeyPatch, every_batch: None
) -> None:
    monkeypatch.setattr(
        memory_files.os, "getpid", lambda: 2**22 + 1
    )  # no process has this id: links that lead nowhere, as for a JVM in another container
    with batch_frame(spark, GIVEN, 2) as frame:
        assert frame.count() == 1000
    assert temporary_files(spark) == []


def test_a_batch_goes_the_other_way_when_there_is_no_room(
    spark, monkeypatch: pytest.MonkeyPatch, every_batch: None
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(memory_files.os, "memfd_create", full)
    with batch_frame(spark, GIVEN, 2) as frame:
        assert frame.count() == 1000


def test_a_file_that_is_gone_is_an_error_whatever_the_session_was_told(spark) -> None:
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with frame_in_memory(spark, GIVEN, 2) as frame:
            next(temporary_files(spark)[0].iterdir()).unlink()
            with pytest.raises(Exception, match=r"FILE_NOT_EXIST|does not exist|No such file"):
                frame.count()
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")


def test_a_killed_process_leaves_no_bytes(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    links = list(tmp_path.iterdir())
    assert len(links) == 2
    assert not any(link.exists() for link in links)


def test_files_hold_the_rows_in_order_and_go_with_the_context(tmp_path: Path) -> None:
    with in_memory(GIVEN, 3, tmp_path) as size:
        files = sorted(tmp_path.iterdir())
        assert sum(file.stat().st_size for file in files) == size
        assert (
            pa.concat_tables(pq.read_table(file) for file in files).cast(GIVEN.schema).equals(GIVEN)
        )
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize(
    ("master", "encrypted", "expected"),
    [
        ("local", False, True),
        ("local[*]", False, True),
        ("local[2,3]", False, True),
        ("local[2]", True, False),
        ("local-cluster[2,1,1024]", False, False),
        ("spark://host:7077", False, False),
        ("yarn", False, False),
    ],
)
def test_only_a_session_on_this_machine_is_handed_files(
    master: str, encrypted: bool, expected: bool
) -> None:
    class Context:
        def __init__(self) -> None:
            self.master, self._encryption_enabled = master, encrypted

    class Session:
        sparkContext = Context()  # noqa: N815 (pyspark's name)

    assert can_share_memory(Session()) is expected  # type: ignore[arg-type]


def test_times_of_any_age_arrive_as_they_were(spark) -> None:
    old = [
        dt.datetime(1, 1, 1, tzinfo=dt.UTC),
        dt.datetime(1582, 10, 10, 1, 2, 3, 4, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, tzinfo=dt.UTC),
    ]
    column = GIVEN.schema.get_field_index("approximate_arrival_timestamp")
    given = GIVEN.slice(0, 3).set_column(
        column, GIVEN.schema.field(column), pa.array(old, pa.timestamp("us", tz="UTC"))
    )
    with frame_in_memory(spark, given, 1) as frame:
        assert frame.toArrow().column("approximate_arrival_timestamp").to_pylist() == old
