"""Functions of a DataFrame that users may write, one for each way in which Spark reads columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Observation, Window
from pyspark.sql import functions as F  # noqa: N812 (as in Spark's documents)

JSON = (
    "order long, items array<struct<sku:int,n:int,price:double>>, amount decimal(12,3), "
    "tags map<string,int>, at timestamp"
)
PARSED = f"from_json(cast(data AS string), '{JSON}') AS j"


def static(frame: DataFrame) -> DataFrame:
    """A table that does not depend on the batch."""
    return frame.sparkSession.range(40).selectExpr(
        "concat('key-', id) AS partition_key", "id * 2 AS v"
    )


def sql(text: str) -> Callable[[DataFrame], DataFrame]:
    def run(frame: DataFrame) -> DataFrame:
        frame.createOrReplaceTempView("records_of_the_batch")
        return frame.sparkSession.sql(text.format(t="records_of_the_batch"))

    return run


def expr(*columns: str) -> Callable[[DataFrame], DataFrame]:
    return lambda frame: frame.selectExpr(*columns)


def lengths(values: pd.Series) -> pd.Series:
    return values.str.len()


def iterated(parts: Iterator[pd.Series]) -> Iterator[pd.Series]:
    for part in parts:
        yield part.str.len()


def summed(values: pd.Series) -> int:
    return int(values.sum())


def arrow_rows(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    held = list(parts)  # batches stay usable when later ones were read
    for part in held:
        yield part.filter(pc.greater(pc.binary_length(part.column("data")), 20))


def pandas_rows(parts: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for part in parts:
        yield part.assign(n=part["data"].str.len())


def pandas_group(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"shard_id": rows["shard_id"][:1], "n": [len(rows)]})


def arrow_group(rows: pa.Table) -> pa.Table:
    return pa.table({"shard_id": [rows.column("shard_id")[0].as_py()], "n": [rows.num_rows]})


def cogroup(left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"shard_id": left["shard_id"][:1], "n": [len(left) * 1000 + len(right)]})


def observed(frame: DataFrame) -> DataFrame:
    seen = Observation()
    frame.observe(
        seen, F.max("partition_key").alias("m"), F.count("*").alias("n"), F.max("data").alias("d")
    ).write.format("noop").mode("overwrite").save()
    found = seen.get
    return frame.limit(1).select(*[F.lit(found[name]).alias(name) for name in ("m", "n", "d")])


def with_actions(frame: DataFrame) -> DataFrame:
    total = frame.sparkSession.sparkContext.accumulator(0)
    frame.foreach(lambda row: total.add(len(row.data)))
    frame.foreachPartition(lambda rows: total.add(sum(1 for _ in rows)))
    kept = [row.partition_key for row in frame.orderBy("sequence_number").take(3)]
    count = frame.count()
    local = sum(1 for _ in frame.select("stream").toLocalIterator())
    return frame.where(F.col("partition_key").isin(kept)).selectExpr(
        "partition_key", f"{total.value} AS total", f"{count} AS n", f"{local} AS m"
    )


def by_rdd(frame: DataFrame) -> DataFrame:
    return frame.rdd.map(lambda row: (row.sequence_number, len(row.data))).toDF(["s", "n"])


def unpersisted(frame: DataFrame) -> DataFrame:
    cached = frame.select("sequence_number", "data").persist(StorageLevel.MEMORY_ONLY)
    cached.count()
    kept = cached.union(cached.where("length(data) > 30"))
    cached.count()
    return kept


def self_join(frame: DataFrame) -> DataFrame:
    counts = frame.groupBy("shard_id").count()
    return counts.alias("a").join(counts.alias("b"), "shard_id").select("shard_id", "a.count")


def shuffled_join(frame: DataFrame) -> DataFrame:
    other = frame.select("sequence_number", F.length("data").alias("n"))
    return frame.join(other.hint("merge"), "sequence_number").select("sequence_number", "n", "data")


def python_udf(kind: str, *, arrow: bool) -> Callable[[DataFrame], DataFrame]:
    return lambda frame: frame.select(
        "sequence_number",
        F.udf(len, kind, useArrow=arrow)("partition_key").alias("n"),
        F.udf(lambda key: None if key is None else key + "!", "string", useArrow=arrow)(
            "explicit_hash_key"
        ).alias("k"),
    )


def pandas_udfs(frame: DataFrame) -> DataFrame:
    return frame.select(
        "sequence_number",
        F.pandas_udf(lengths, "long")("partition_key").alias("n"),
        F.pandas_udf(iterated, "long")("data").alias("b"),
    )


def pandas_aggregate(frame: DataFrame) -> DataFrame:
    total = F.pandas_udf(summed, "long")
    return frame.groupBy("shard_id").agg(total(F.length("data").cast("long")).alias("n"))


def arrow_udf(frame: DataFrame) -> DataFrame:
    if not hasattr(F, "arrow_udf"):  # Spark 4.0
        return frame.select("sequence_number")
    length = F.arrow_udf(pc.binary_length, "int")
    return frame.select("sequence_number", length("data").alias("n"))


def udtf(frame: DataFrame) -> DataFrame:
    class Letters:
        def eval(self, text: str) -> Iterator[tuple[str]]:
            for letter in text[:3]:
                yield (letter,)

    frame.sparkSession.udtf.register("letters", F.udtf(Letters, returnType="letter string"))
    return sql("SELECT sequence_number, letter FROM {t}, LATERAL letters(partition_key)")(frame)


def windowed(frame: DataFrame) -> DataFrame:
    rows = Window.partitionBy("shard_id").orderBy("sequence_number")
    return frame.select(
        "sequence_number",
        F.row_number().over(rows).alias("r"),
        F.lag("data", 2).over(rows).alias("lag"),
        F.lead("explicit_hash_key").over(rows).alias("lead"),
        F.sum(F.length("data")).over(rows.rowsBetween(-2, 1)).alias("s"),
        F.first("partition_key").over(rows).alias("first"),
    )


def aggregates(frame: DataFrame) -> DataFrame:
    return frame.groupBy("shard_id").agg(
        F.count("explicit_hash_key").alias("n"),
        F.max("data").alias("largest"),
        F.min("approximate_arrival_timestamp").alias("first"),
        F.countDistinct("partition_key").alias("keys"),
        F.sort_array(F.collect_list("partition_key")).alias("all"),
        F.sort_array(F.collect_set("explicit_hash_key")).alias("set"),
        F.max_by("data", "sequence_number").alias("last"),
        F.expr("percentile_approx(length(data), 0.5)").alias("median"),
        F.approx_count_distinct("sequence_number").alias("about"),
    )


SCHEMA = "sequence_number string, partition_key string, data binary"
THREE = ("sequence_number", "partition_key", "data")
FUNCTIONS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "identity": lambda frame: frame,
    "one column": expr("data"),
    "columns in another order": expr("data", "stream", "explicit_hash_key"),
    "no column": expr("1 AS one"),
    "no row": lambda frame: frame.where("false"),
    "filter": lambda frame: frame.where("explicit_hash_key IS NULL AND length(data) > 10"),
    "text functions": expr(
        "upper(partition_key) u",
        "sha2(data, 256) h",
        "base64(data) b",
        "length(partition_key) n",
        "regexp_replace(sequence_number, '[0-4]', 'x') r",
        "concat_ws('-', stream, shard_id) c",
    ),
    "parsed JSON": expr("sequence_number", PARSED),
    "maps and structs": expr(
        "map(partition_key, data) m",
        "struct(stream, explicit_hash_key) s",
        "map_from_arrays(array(stream), array(struct(data))) nested",
        "array(data, data) a",
    ),
    "exploded": lambda frame: frame.selectExpr("sequence_number s", PARSED).selectExpr(
        "s", "inline_outer(j.items)"
    ),
    "exploded map": lambda frame: frame.selectExpr("sequence_number s", PARSED).selectExpr(
        "s", "explode(j.tags)"
    ),
    "exploded text": expr("sequence_number", "posexplode(split(partition_key, '-'))"),
    "functions of arrays": expr(
        "transform(split(partition_key, '-'), x -> concat(x, stream)) t",
        "aggregate(sequence(1, 5), 0, (a, x) -> a + x + length(data)) s",
    ),
    "decimals": expr(
        "cast(sub_sequence_number AS decimal(20, 2)) / 7 d",
        "cast(sequence_number AS decimal(38)) w",
        "cast(length(data) AS decimal(10, 3)) * 1.005 e",
    ),
    "times": expr(
        "approximate_arrival_timestamp AS at",
        "cast(approximate_arrival_timestamp AS timestamp_ntz) ntz",
        "to_date(approximate_arrival_timestamp) d",
        "from_utc_timestamp(approximate_arrival_timestamp, 'Asia/Kolkata') k",
        "date_format(approximate_arrival_timestamp, 'yyyy-MM-dd HH:mm:ss.SSSSSS') f",
        "unix_micros(approximate_arrival_timestamp) m",
        "approximate_arrival_timestamp + interval 1 month later",
    ),
    "time windows": lambda frame: frame.groupBy(
        F.window("approximate_arrival_timestamp", "1 minute", "30 seconds")
    ).count(),
    "session windows": lambda frame: frame.groupBy(
        F.session_window("approximate_arrival_timestamp", "1 second"), "shard_id"
    ).count(),
    "nulls": expr(
        "explicit_hash_key IS NULL n",
        "coalesce(explicit_hash_key, partition_key) c",
        "explicit_hash_key <=> encryption_type e",
        "nullif(stream, stream) never",
    ),
    "nulls filled": lambda frame: frame.na.fill("none").na.drop(subset=["encryption_type"]),
    "broadcast join": lambda frame: frame.join(F.broadcast(static(frame)), "partition_key", "left"),
    "join of keys": lambda frame: frame.join(static(frame).hint("shuffle_hash"), "partition_key"),
    "join that broadcasts the batch": lambda frame: static(frame).join(
        F.broadcast(frame), "partition_key", "left"
    ),
    "full join": lambda frame: static(frame).join(frame, "partition_key", "full"),
    "semi join": lambda frame: frame.join(static(frame), "partition_key", "left_semi"),
    "anti join": lambda frame: frame.join(static(frame), "partition_key", "left_anti"),
    "cross join": lambda frame: frame.limit(5).crossJoin(static(frame).limit(3)),
    "join with itself": shuffled_join,
    "join of its own counts": self_join,
    "subqueries": sql(
        "SELECT sequence_number, (SELECT max(length(data)) FROM {t}) m FROM {t} a WHERE EXISTS "
        "(SELECT 1 FROM {t} b WHERE b.partition_key = a.partition_key AND b.shard_id > a.shard_id)"
    ),
    "aggregates": aggregates,
    "whole aggregate": lambda frame: frame.agg(
        F.max("data"), F.count("*"), F.min("explicit_hash_key")
    ),
    "count": sql("SELECT count(*) n FROM {t}"),
    "rollup": lambda frame: frame.rollup("shard_id", "encryption_type").count(),
    "pivot": lambda frame: (
        frame.groupBy("stream").pivot("shard_id").agg(F.max("data"))  # noqa: PD010 (Spark's)
    ),
    "distinct": lambda frame: frame.select("shard_id", "explicit_hash_key").distinct(),
    "no duplicates": lambda frame: frame.select("partition_key", "shard_id").dropDuplicates(),
    "windows": windowed,
    "sorted": lambda frame: frame.orderBy(F.desc("data"), "sequence_number"),
    "sorted and limited": lambda frame: frame.orderBy("sequence_number").limit(7),
    "union": lambda frame: frame.union(frame).where("length(data) > 3"),
    "except": lambda frame: frame.select("partition_key").exceptAll(
        frame.where("explicit_hash_key IS NULL").select("partition_key")
    ),
    "repartitioned": lambda frame: frame.repartition(7, "partition_key").coalesce(2),
    "one partition": lambda frame: frame.coalesce(1),
    "cached": lambda frame: frame.select("sequence_number", "data", "explicit_hash_key").cache(),
    "cached and read twice": unpersisted,
    "local checkpoint": lambda frame: frame.localCheckpoint(),
    "observed": observed,
    "actions inside": with_actions,
    "rows of an RDD": by_rdd,
    "Python function": python_udf("int", arrow=False),
    "Python function by Arrow": python_udf("int", arrow=True),
    "pandas functions": pandas_udfs,
    "pandas aggregate": pandas_aggregate,
    "Arrow function": arrow_udf,
    "table function": udtf,
    "mapInArrow": lambda frame: frame.mapInArrow(arrow_rows, frame.schema),
    "mapInArrow of some columns": lambda frame: frame.select(*THREE).mapInArrow(arrow_rows, SCHEMA),
    "mapInPandas": lambda frame: frame.select(*THREE).mapInPandas(pandas_rows, SCHEMA + ", n int"),
    "limited Python function": lambda frame: (
        python_udf("int", arrow=True)(frame).limit(2).selectExpr("count(*)")
    ),
    "applyInPandas": lambda frame: frame.groupBy("shard_id").applyInPandas(
        pandas_group, "shard_id string, n long"
    ),
    "applyInArrow": lambda frame: frame.groupBy("shard_id").applyInArrow(
        arrow_group, "shard_id string, n long"
    ),
    "cogroup": lambda frame: (
        frame.groupBy("shard_id")
        .cogroup(frame.where("length(data) > 20").groupBy("shard_id"))
        .applyInPandas(cogroup, "shard_id string, n long")
    ),
    "script": sql(
        "SELECT TRANSFORM(sequence_number, partition_key) USING 'cat' AS (s, k) FROM {t}"
    ),
    "hashed": lambda frame: frame.orderBy("sequence_number").selectExpr("xxhash64(data) h", "data"),
    "variant": expr("to_json(parse_json(cast(data AS string))) v"),
    "wide text": expr("repeat(partition_key, 5000) w", "lpad(stream, 40000, 'ü') p"),
}


def rows_of(frame: DataFrame) -> tuple[Any, list[str]]:
    """Schema and rows of a result, in an order that does not depend on the tasks."""
    table = frame.toArrow()
    return frame.schema, sorted(map(repr, table.to_pylist()))
