"""Call the transform of a pipeline on records that a test writes down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from kcl_pipeline.batch import RECORD_SCHEMA, apply_arrow_transform, split_rejected
from kcl_pipeline.delta.files import TableColumns
from kcl_pipeline.delta.settings import DeltaSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kcl_pipeline.pipeline import KinesisPipeline

Payload = bytes | str | Mapping[str, Any]
"""The data of a record. A string is encoded as UTF-8, and a mapping as JSON."""

_ARRIVAL: Final = datetime(2026, 1, 1, tzinfo=UTC)
_SPARK: Final = {"spark.master": "local[2]", "spark.ui.enabled": "false"}


@dataclass(frozen=True, slots=True)
class TransformResult:
    """What a transform returned."""

    rows: list[dict[str, Any]]
    """The rows for the table, in the transform's order."""
    errors: dict[int, str]
    """The text of `_error` by the index of the payload."""


def encode(payload: Payload) -> bytes:
    """Return the bytes of a payload."""
    if isinstance(payload, Mapping):
        return json.dumps(payload).encode()
    return payload.encode() if isinstance(payload, str) else payload


def make_records(
    payloads: Sequence[Payload],
    *,
    stream: str = "orders",
    shard_id: str = "shardId-000000000000",
    partition_key: str | None = "key",
) -> pa.Table:
    """Return records with these payloads as a transform receives them (`RECORD_SCHEMA`).

    The sequence number of a record is the index of its payload.

    Args:
        payloads: The data of each record.
        stream: Name of the stream.
        shard_id: The shard.
        partition_key: The partition key. None: the records were put without a key.
    """
    rows = [
        {
            "stream": stream,
            "shard_id": shard_id,
            "sequence_number": str(index),
            "sub_sequence_number": 0,
            "partition_key": partition_key,
            "explicit_hash_key": None,
            "data": encode(payload),
            "approximate_arrival_timestamp": _ARRIVAL,
            "encryption_type": None,
        }
        for index, payload in enumerate(payloads)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)


def run_transform(
    pipeline: KinesisPipeline, payloads: Sequence[Payload] | pa.Table
) -> TransformResult:
    """Call the transform of a pipeline once, on one batch.

    A Spark transform runs in the active session, or in a new one with two cores.

    Args:
        pipeline: The pipeline. Its streams are not used, and nothing is written.
        payloads: The data of each record, or a table of `make_records`.

    Raises:
        TransformFailedError: The transform raised (the cause is chained), or the table of a
            `DeltaSink` cannot hold a value of its result.
    """
    records = (
        payloads
        if isinstance(payloads, pa.Table)
        else make_records(payloads, stream=next(iter(pipeline.settings.streams), "stream"))
    )
    if pipeline.transform is None:
        output = apply_arrow_transform(pipeline.transform_arrow, records)
    else:
        output = _on_spark(pipeline, records)
    rows, rejected = split_rejected(output)
    if isinstance(pipeline.sink, DeltaSink):
        TableColumns(partition_by=tuple(pipeline.sink.partition_by)).convert(rows, alone=True)
    numbers = [] if rejected is None else rejected.column("sequence_number").to_pylist()
    texts = [] if rejected is None else rejected.column("error").to_pylist()
    return TransformResult(
        rows.to_pylist(), {int(number): text for number, text in zip(numbers, texts, strict=True)}
    )


def spark_session() -> SparkSession:
    """Return the active Spark session, or a new one with two cores on this machine."""
    from kcl_pipeline.spark.session import build_session  # noqa: PLC0415 (it needs pyspark)

    return build_session("tests", _SPARK)


def _on_spark(pipeline: KinesisPipeline, records: pa.Table) -> pa.Table:
    # they need pyspark
    from kcl_pipeline.spark.failures.job_errors import classified  # noqa: PLC0415
    from kcl_pipeline.spark.writer import records_frame, transformed  # noqa: PLC0415

    frame = records_frame(spark_session(), records)
    output = transformed(frame, pipeline.transform, records.num_rows)
    try:
        return output.toArrow()
    except Exception as error:
        raise classified(error, records.num_rows) from error
