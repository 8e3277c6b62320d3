"""The stream `telemetry` in a Delta table, by a Spark function. Spark needs Java."""

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline, java_command
from resources import LAKE, aws

# `_raw` receives what cannot be parsed.
READING = "id string, metric string, value double, time timestamp, _raw string"
POSITION = ["shard_id", "sequence_number", "sub_sequence_number"]


def parse(records: DataFrame) -> DataFrame:
    """Return one row per record; one that is not a reading becomes a dead letter."""
    text = f.col("data").cast("string")
    reading = f.from_json(text, READING, {"columnNameOfCorruptRecord": "_raw"})
    # from_json ignores what follows the first object. Of one object, this array has the length 2.
    length = f.json_array_length(f.concat(f.lit("["), text, f.lit(", 0]")))
    rows = records.select(*POSITION, reading.alias("reading"), length.alias("length"))
    error = (
        f.when(f.col("reading._raw").isNotNull(), "not JSON, or a field of another type")
        .when(~f.col("length").eqNullSafe(2), "not one JSON object")
        .when(f.col("reading.metric").isNull(), "metric is missing")
    )
    return rows.select("reading.*", *POSITION, error.alias("_error")).drop("_raw")


telemetry = KinesisPipeline(
    name="telemetry",
    streams=["telemetry"],
    transform=parse,
    sink=DeltaSink(f"{LAKE}/telemetry"),
    workers=Fleet(min=1, max=2),
)
if java_command() is None:
    defs = dg.Definitions(
        assets=[
            dg.AssetSpec(
                ["telemetry", "needs_java"],
                group_name="telemetry",
                description="The pipeline `telemetry` is not loaded: its function is one of Spark, "
                "and there is no Java on this machine. Install Java 17 or newer and reload.",
            )
        ]
    )
else:
    defs = telemetry.definitions(aws=aws, leader_default_running=True)
