"""Consumer with Spark Structured Streaming: text files, `from_json`, a Delta table.

It runs in the environment of the package `delta-spark`. One file with JSON lines has many names
(hard links), so that there are always new files. They are in the page cache. The reader, the
function and the writer are Spark's and Delta's. The number of rows read is printed after each
batch.

    python structured_streaming.py FOLDER SIZE JARS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from from_json import four_columns, texts  # (a module next to this one)
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

FILE_RECORDS = 40_000
FILES = 3_000
FILES_PER_BATCH = 5
"""200,000 records, more than a batch of this project has at 1 KB (64 MiB)."""


class Printer(StreamingQueryListener):
    """Prints the total number of rows read."""

    def __init__(self) -> None:
        self.total = 0

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 (names of Spark)
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Count the rows of a batch."""
        self.total += event.progress.numInputRows
        print(self.total, flush=True)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Do nothing."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Do nothing."""


def write_files(folder: Path, size: int) -> None:
    """Write one file and link it under many names."""
    folder.mkdir()
    first = folder.parent / "lines.txt"
    first.write_bytes(b"".join(text + b"\n" for text in texts(size, FILE_RECORDS)))
    for number in range(FILES):
        os.link(first, folder / f"lines-{number:06d}.txt")


def main(folder: Path, size: int, jars: str) -> None:
    """Consume the files until the process is killed."""
    write_files(folder / "in", size)
    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.jars", jars)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    spark.streams.addListener(Printer())
    lines = (
        spark.readStream.format("text")
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .load(str(folder / "in"))
        .withColumnRenamed("value", "data")
    )
    query = (
        four_columns(lines)
        .writeStream.format("delta")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start(str(folder / "table"))
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
