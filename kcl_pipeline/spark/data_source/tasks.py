"""Build the partitions of a batch, and read them in Spark tasks.

A partition contains the planner's records as Arrow IPC, or ranges that the task reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.spark.data_source.options import MEBIBYTE, SourceOptions
from kcl_pipeline.spark.data_source.plan import Piece, read_rules
from kcl_pipeline.spark.data_source.read import ReadRange, read_range

TASK_BYTES: Final = 4 * MEBIBYTE
"""Held records of several shards go to one task up to this size, because each task has a cost."""

BATCH_ROWS: Final = 10_000
SMALL_ROWS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ShardShare:
    """One shard's share of a task: `held` (an Arrow IPC stream) before `rest`."""

    held: bytes | None
    rest: ReadRange | None

    def __str__(self) -> str:
        held = "" if self.held is None else f"{len(self.held)} bytes held"
        return " and ".join(text for text in (held, str(self.rest or "")) if text)


class KinesisPartition(InputPartition):
    """The shares of one task, in the order of their rows."""

    def __init__(self, shares: tuple[ShardShare, ...]) -> None:
        super().__init__(shares)
        self.shares = shares

    def __repr__(self) -> str:
        return f"KinesisPartition({', '.join(map(str, self.shares))})"


def partitions_of(pieces: Sequence[Piece]) -> list[InputPartition]:
    """One task per range that must be read. Held records share tasks up to `TASK_BYTES`."""
    tasks: list[InputPartition] = []
    together: list[ShardShare] = []
    size = 0
    for piece in pieces:
        part = ShardShare(_to_ipc(piece.records) if piece.records else None, piece.rest)
        if piece.rest is not None:
            tasks.append(KinesisPartition((part,)))
            continue
        if together and size + piece.bytes > TASK_BYTES:
            tasks.append(KinesisPartition(tuple(together)))
            together, size = [], 0
        together.append(part)
        size += piece.bytes
    if together:
        tasks.append(KinesisPartition(tuple(together)))
    return tasks


def read_partition(
    partition: InputPartition, options: SourceOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task.

    For a read without partitions Spark may pass `None`, which has no rows.
    """
    if not isinstance(partition, KinesisPartition):
        return
    rules, clock, rng = read_rules(options), SystemClock(), random.Random()
    kinesis: KinesisClient | None = None
    with ExitStack() as opened:
        for part in partition.shares:
            if part.held is not None:
                yield from _as_batches(pa.ipc.open_stream(part.held).read_all(), schema)
            if part.rest is not None:
                kinesis = kinesis or opened.enter_context(open_reading(options, clock))
                for table in read_range(kinesis, part.rest, rules, clock, rng):
                    yield from _as_batches(table, schema)


@contextmanager
def open_reading(options: SourceOptions, clock: Clock) -> Iterator[KinesisClient]:
    """Open the Kinesis client. Missing options come from the standard environment."""
    # Loaded here: a task with held records does not need boto3, whose import is slow.
    from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis  # noqa: PLC0415

    keys = options.access_key_id, options.secret_access_key, options.session_token
    session = SessionOptions(options.region, options.profile, options.endpoint_url, *keys)
    with closing(AwsClients(options.consumer, session)) as clients:
        yield open_kinesis(options.consumer, clients, clock)


def _to_ipc(tables: Sequence[pa.Table]) -> bytes:
    table = pa.concat_tables(tables)
    if table.num_rows < SMALL_ROWS * len(tables):
        # Each record batch has a cost in Spark, but large ones are not worth a copy.
        table = table.combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _as_batches(table: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Convert to non-empty batches with Spark's schema.

    Spark requires exactly its schema, and interprets an empty batch as the end.
    """
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
