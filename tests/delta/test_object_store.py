"""The same table in an object store, S3 of the embedded AWS: many processes, compaction and
vacuum while batches wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import boto3
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from moto.s3.models import s3_backends

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.log import entry_facts, read_transactions
from kcl_pipeline.delta.maintenance import Compacted, compact, vacuum
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.sink import transaction_names
from kcl_pipeline.delta.storage import Storage
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.sinks.announcements import FOLDER
from tests.support.announcing import announce
from tests.support.delta_tables import NONE, Committer, committer, entry, seq, upkeep_ended
from tests.support.sink_writers import SHARED, run_writers

SCHEMA = pa.schema([("id", pa.int64())])
DEADLINE_SECONDS = 30.0
BUCKET = "object-store"  # bucket names are global in a process


@pytest.fixture(scope="module")
def options() -> Iterator[Mapping[str, str]]:
    """How to reach a server with an empty bucket."""
    keys = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "region_name": "us-east-1",
    }
    with EmbeddedAws() as aws:
        boto3.client("s3", endpoint_url=aws.endpoint_url, **keys).create_bucket(Bucket=BUCKET)
        yield {
            "AWS_ENDPOINT_URL": aws.endpoint_url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }


class Table:
    """One table of the bucket."""

    def __init__(self, name: str, options: Mapping[str, str], **settings: Any) -> None:
        self.uri, self.options = f"s3://{BUCKET}/{name}", options
        self.settings = settings
        self.storage: Storage = open_storage(self.uri, options)
        self._writer = ArrowBatchWriter(None, self.uri, storage_options=options)
        self.sink = self.new_sink()
        self.sink.ensure(SCHEMA)

    def new_sink(self) -> Committer:
        return committer(self.uri, storage_options=self.options, **self.settings)

    def write(self, ident: int) -> Batch:
        return self._writer.write(Batch("b", (), pa.table({"id": pa.array([ident], pa.int64())})))

    def commit(self, ident: int) -> int | None:
        expected = self.sink.stored("a")
        return self.sink.land(
            self.write(ident), [entry("a", expected.number + 1, expected)]
        ).version

    def ids(self) -> list[int]:
        return sorted(
            DeltaTable(self.uri, storage_options=dict(self.options))
            .to_pyarrow_table()["id"]
            .to_pylist()
        )

    def objects(self, folder: str, suffix: str) -> list[str]:
        return [stored.path for stored in self.storage.list(folder) if stored.path.endswith(suffix)]

    def age(self, path: str, hours: float) -> None:
        """Let the store believe that an object is so old."""
        key = f"{self.uri.removeprefix(f's3://{BUCKET}/')}/{path}"
        # Which account the server has put them into depends on what other tests have done with its
        # roles
        stores = [store for account in s3_backends.values() for store in account.values()]
        (found,) = [
            keys[key]
            for store in stores
            if BUCKET in store.buckets and key in (keys := store.buckets[BUCKET].keys)
        ]
        found.last_modified -= timedelta(hours=hours)


@pytest.mark.processes
def test_processes_on_an_object_store_lose_and_repeat_nothing(
    options: Mapping[str, str],
) -> None:
    uri = f"s3://{BUCKET}/writers"
    results = run_writers(uri, workers=3, commits=4, options=options)
    table = Table("writers", options)
    assert table.ids() == sorted(ident for result in results for ident in result["written"])
    entries = [table.storage.read(path) for path in table.objects("_delta_log", ".json")]
    added = [line for entry in entries for line in entry.splitlines() if line.startswith(b'{"add"')]
    assert len(added) == sum(len(result["written"]) for result in results) >= 12
    contested = [
        number
        for entry in entries
        for key, number in entry_facts(entry).transactions.items()
        if key == transaction_names(f"app/{SHARED}")[0]
    ]
    assert len(contested) == len(set(contested)) == sum(result["won"] for result in results)
    assert set(
        table.sink.positions(
            [f"{worker}-{lease}" for worker in (1, 2, 3) for lease in "xy"]
        ).shards.values()
    ) == {seq(4)}
    assert table.objects(FOLDER, ".json") == []


def test_compaction_in_an_object_store_stops_nobody(options: Mapping[str, str]) -> None:
    table = Table("compacted", options)
    for ident in range(1, 5):
        assert table.commit(ident) is not None
    prepared, waiting = table.write(5), table.write(6)
    announce(table.new_sink(), waiting.files, entry("b", 1))
    stale = table.new_sink()
    assert stale.stored("a") == seq(4)
    assert compact(table.uri, options) == Compacted(4, 1)
    assert compact(table.uri, options) == Compacted(0, 0)
    stale._pace.lost(2)
    assert stale.land(prepared, [entry("a", 5, seq(4))]).version == 6
    assert (table.sink.stored("a"), table.sink.stored("b")) == (seq(5), seq(1))
    assert table.ids() == [1, 2, 3, 4, 5, 6]


def test_vacuum_in_an_object_store_takes_old_rubbish_alone(options: Mapping[str, str]) -> None:
    table = Table("vacuumed", options)
    assert table.commit(1) == 1
    given_up, forgotten, young = table.write(2), table.write(3), table.write(4)
    old = announce(table.sink, forgotten.files, entry("o", 1))
    new = announce(table.sink, young.files, entry("y", 1))
    doomed = sorted(file.path for batch in (given_up, forgotten) for file in batch.files)
    for path in (*doomed, old.name):
        table.age(path, 50)
    assert sorted(vacuum(table.uri, 49, options, dry_run=True)) == doomed
    assert old.name in table.objects(FOLDER, ".json")
    assert sorted(vacuum(table.uri, 49, options)) == doomed
    assert table.objects(FOLDER, ".json") == [new.name]
    assert set(table.objects("", ".parquet")) & set(doomed) == set()
    table.sink._pace.lost(2)
    assert table.commit(5) is not None, "the young announcement lands with it"
    assert table.ids() == [1, 4, 5]


def test_checkpoints_and_numbers_in_an_object_store(options: Mapping[str, str]) -> None:
    table = Table("checkpointed", options, table_properties={"delta.checkpointInterval": "3"})
    for ident in range(1, 6):
        assert table.commit(ident) == ident
    assert upkeep_ended(table.sink.delta_log, DEADLINE_SECONDS)
    assert table.objects("_delta_log", ".checkpoint.parquet") == [
        f"_delta_log/{3:020d}.checkpoint.parquet"
    ]
    assert (read_transactions(table.storage, 5) or {})[transaction_names("app/a")[1]] == 5
    for version in range(3):
        table.storage.delete(f"_delta_log/{version:020d}.json")
    assert (table.new_sink().stored("a"), table.new_sink().stored("b")) == (seq(5), NONE)


def test_partition_folders_in_an_object_store(options: Mapping[str, str]) -> None:
    uri, by = f"s3://{BUCKET}/partitioned", ("text", "day")
    texts = ["a b/%20=c", "ü~", "", None]
    rows = pa.table({"text": texts, "day": pa.array([0, 1, 2, 3], pa.date32()), "id": range(4)})
    writer = ArrowBatchWriter(None, uri, by, options)
    sink = committer(uri, partition_by=by, storage_options=options)
    own, piggybacked = (writer.write(Batch("b", (), rows)) for _ in range(2))
    sink.ensure(own.output_schema)
    announce(
        committer(uri, partition_by=by, storage_options=options), piggybacked.files, entry("b", 1)
    )
    sink._pace.lost(2)
    assert sink.land(own, [entry("a", 1)]).version == 1
    paths = {file.path for file in (*own.files, *piggybacked.files)}
    assert paths == {one.path for one in sink.delta_log.storage.list("batches")}
    assert {path.split("/", 2)[2].rpartition("/")[0] for path in paths} == {
        "text=a%20b%2F%2520%3Dc/day=1970-01-01",
        "text=%C3%BC%7E/day=1970-01-02",
        "text=__HIVE_DEFAULT_PARTITION__/day=1970-01-03",
        "text=__HIVE_DEFAULT_PARTITION__/day=1970-01-04",
    }
    expected = [{"text": row["text"] or None, "day": row["day"]} for row in rows.to_pylist()]
    abandoned = {file.path for file in writer.write(Batch("b", (), rows)).files}
    removed = DeltaTable(uri, storage_options=dict(options)).vacuum(
        retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True
    )
    assert set(removed) == abandoned
    assert paths == {one.path for one in sink.delta_log.storage.list("batches")}
    for _ in range(2):
        table = DeltaTable(uri, storage_options=dict(options)).to_pyarrow_table().sort_by("id")
        assert table.select(by).to_pylist() == [row for row in expected for _ in range(2)]
        compact(uri, options)
