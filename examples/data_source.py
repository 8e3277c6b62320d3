"""Kinesis data source in Spark: a windowed count with a watermark, and a batch read.

    python examples/data_source.py

The example starts the embedded AWS and sets the environment variables that point to it. For AWS,
remove `EmbeddedAws` and change the stream.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time

import boto3
from pyspark.sql import functions as f

from kcl_pipeline import EmbeddedAws, KinesisDataSource, build_session


def main() -> None:
    """Put a thousand clicks, count them per page and ten seconds, and read them as a batch."""
    with EmbeddedAws() as aws, tempfile.TemporaryDirectory() as checkpoint:
        os.environ |= aws.environment()
        kinesis = boto3.client("kinesis")
        kinesis.create_stream(StreamName="clicks", ShardCount=2)
        rng = random.Random(1)
        now = time.time()
        clicks = [{"page": rng.choice("abc"), "at": now - 60 + i / 20} for i in range(1000)]
        for begin in range(0, len(clicks), 500):
            records = [
                {"Data": json.dumps(click).encode(), "PartitionKey": click["page"]}
                for click in clicks[begin : begin + 500]
            ]
            kinesis.put_records(StreamName="clicks", Records=records)

        spark = build_session("clicks", {"spark.master": "local[2]"})
        spark.dataSource.register(KinesisDataSource)
        options = {"streamName": "clicks"}

        stream = (
            spark.readStream.format("kinesis").options(**options, maxRecordsPerTrigger=400).load()
        )
        parsed = stream.select(
            f.from_json(f.col("data").cast("string"), "page string, at double").alias("click")
        ).select("click.*")
        counts = (
            parsed.withColumn("at", f.timestamp_seconds("at"))
            .withWatermark("at", "5 seconds")
            .groupBy(f.window("at", "10 seconds"), "page")
            .count()
        )
        query = (
            counts.writeStream.format("memory")
            .queryName("counts")
            .outputMode("append")
            .option("checkpointLocation", checkpoint)
        )
        query.trigger(availableNow=True).start().awaitTermination()
        spark.sql("select window.start, page, count from counts order by 1, 2").show(
            6, truncate=False
        )

        batch = spark.read.format("kinesis").options(**options).load()
        print(
            f"{batch.count()} records in the stream, from "
            f"{batch.select('shard_id').distinct().count()} shards"
        )
        spark.stop()


if __name__ == "__main__":
    main()
