"""The process that starts Spark's Python workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pyspark
from pyspark.sql import functions as f

from kcl_pipeline.spark.python_daemon import without_archives

HOME = str(Path(pyspark.__file__).parent)
ARCHIVES = [
    f"{HOME}/python/lib/pyspark.zip",
    f"{HOME}/python/lib/py4j-0.10.9.9-src.zip",
    f"{HOME}/jars/spark-core_2.13-4.3.0.jar",
]


def test_archives_of_spark_leave_the_import_path() -> None:
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    assert without_archives(["/app", *ARCHIVES, *packages], HOME) == ["/app", *packages]


def test_archives_stay_if_pyspark_is_not_an_installed_package(tmp_path: Path) -> None:
    path = ["/app", *ARCHIVES]
    assert without_archives(path, HOME) == path
    assert without_archives([*path, *sys.path], "") == [*path, *sys.path]
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "daemon.py").touch()
    without_py4j = [f"{tmp_path}/pyspark/python/lib/pyspark.zip", str(tmp_path)]
    assert without_archives(without_py4j, f"{tmp_path}/pyspark") == without_py4j


def test_a_worker_reads_no_archive(spark) -> None:
    """Neither to import a module, nor when Spark tells Python that its files have changed."""

    def archives(_):
        entries = [*sys.path, *(path for path, finder in sys.path_importer_cache.items() if finder)]
        return " ".join(one for one in entries if one.endswith((".jar", "pyspark.zip", "-src.zip")))

    [row] = spark.range(1).select(f.udf(archives, "string")("id")).collect()
    assert row[0] == ""
