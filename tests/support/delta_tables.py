"""Writers of Delta tables that do not wait, and what a table has."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from kcl_pipeline.batch import NO_RECORDS, Batch
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.log import DeltaLog
from kcl_pipeline.delta.sink import DeadLetterTable, DeltaCommitter, DeltaSink
from kcl_pipeline.delta.storage import Storage
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition
from kcl_pipeline.sinks.sink import CommitOutcome, Sink


class NoWait:
    """A clock whose waits are counted, not waited."""

    def __init__(self) -> None:
        self.waits = 0

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_700_000_000.0

    def sleep(self, seconds: float) -> None:
        self.waits += 1

    def signal(self) -> StopSignal:
        return threading.Event()

    def lock(self) -> AbstractContextManager[object]:
        return threading.Lock()


NONE = NOTHING_STORED
NOTHING = Batch("nothing", (), NO_RECORDS, files=())
"""A batch whose output has no rows."""


def at(number: int, times: int = 1) -> StoredPosition:
    """What a table stores after `times` commits, the last of which ended at `number`."""
    return StoredPosition(times, Position(str(number)))


def seq(number: int) -> StoredPosition:
    """What a table stores after commits that ended at 1, 2, ..., `number`."""
    return at(number, number) if number else NONE


class Entry(NamedTuple):
    """One shard of a commit."""

    key: str
    expected: StoredPosition
    becomes: StoredPosition


def entry_of(
    key: str, expected: StoredPosition, position: Position | None, *, ended: bool = False
) -> Entry:
    return Entry(key, expected, expected.moved(position, ended=ended))


def entry(key: str, number: int, expected: StoredPosition = NONE) -> Entry:
    return entry_of(key, expected, Position(str(number)))


def commit_entries(
    sink: Sink, table_id: str | None, batch: Batch, entries: Sequence[Entry]
) -> CommitOutcome:
    expected = {one.key: one.expected for one in entries}
    becomes = {one.key: one.becomes for one in entries}
    return sink.commit(table_id, batch.written_files, expected, becomes, batch.output_schema)


class Committer(DeltaCommitter):
    """A committer with the id of the table at hand."""

    @property
    def delta_log(self) -> DeltaLog:
        return self._log._log

    def land(self, batch: Batch, entries: Sequence[Entry]) -> CommitOutcome:
        table = DeltaTable(self._log.name, storage_options=dict(self.delta_log._options))
        return commit_entries(self, str(table.metadata().id), batch, entries)

    def stored(self, key: str) -> StoredPosition:
        return self.positions([key]).shards[key]

    def move(self, key: str, number: int, expected: StoredPosition = NONE) -> bool:
        """Set a position without files; return whether that landed."""
        return self.land(NOTHING, [entry(key, number, expected)]).version is not None


def committer(uri: str, **settings: Any) -> Committer:
    sink = DeltaSink(uri, **settings)
    return Committer(sink, "app", clock=NoWait(), rng=random.Random(1))


def put(storage: Storage, path: str, data: bytes) -> None:
    with storage.create(path) as stream:
        stream.write(data)


def upkeep_ended(log: DeltaLog, timeout_seconds: float) -> bool:
    """Wait until nothing runs. False: something still runs after this time."""
    running = log.checkpoints._last
    return running is None or not wait([running], timeout_seconds).not_done


def dead_letter_table(uri: str) -> DeadLetterTable:
    return DeadLetterTable(DeltaSink(uri), NoWait(), random.Random(1))


def written(uri: str, *ids: int, **more: pa.Array) -> Batch:
    return ArrowBatchWriter(None, uri).write(
        Batch("b", (), pa.table({"id": pa.array(ids, pa.int64()), **more}))
    )


def ids(uri: str) -> list[int]:
    return sorted(DeltaTable(uri).to_pyarrow_table()["id"].to_pylist())


def log_lines(uri: str) -> list[dict]:
    return [
        json.loads(line)
        for file in sorted((Path(uri) / "_delta_log").glob("*.json"))
        for line in file.read_text().splitlines()
    ]
