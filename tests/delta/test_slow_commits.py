"""A commit whose write hung past the clean-up of the log is read back, and not believed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.log import entry_path
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.position import StoredPosition
from tests.support.delta_tables import (
    NOTHING,
    NoWait,
    commit_entries,
    committer,
    entry,
    entry_of,
    ids,
    seq,
    written,
)
from tests.support.s3_proxy import Request, S3Proxy, s3_proxy

SCHEMA = pa.schema([("id", pa.int64())])
BUCKET = "slow-commits"
FIRST = entry("a", 1).becomes
_numbers = itertools.count()


class Hours(NoWait):
    """A clock that a test entries."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    with EmbeddedAws() as aws:
        boto3.client("s3", endpoint_url=aws.endpoint_url, **keys).create_bucket(Bucket=BUCKET)
        yield aws.endpoint_url


@pytest.fixture
def proxy(endpoint: str) -> Iterator[S3Proxy]:
    with s3_proxy(endpoint) as found:
        yield found


def options(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
    }


class HungWrite:
    """A table in a store where the write of version 2 hangs.

    Meanwhile others commit, write a log checkpoint, and remove the entries before it.
    """

    def __init__(self, endpoint: str, proxy: S3Proxy, seconds: float) -> None:
        self.uri = f"s3://{BUCKET}/t{next(_numbers)}"
        self.direct, self.clock, self.seconds = options(endpoint), Hours(), seconds
        first = committer(self.uri, storage_options=self.direct)
        first.ensure(SCHEMA)
        self.table_id = first.positions([]).table_id
        assert commit_entries(first, self.table_id, self.written(1), [entry("a", 1)]).version == 1
        sink = DeltaSink(self.uri, storage_options=options(proxy.url))
        self.sink = DeltaCommitter(sink, "app", clock=self.clock, rng=random.Random(1))
        assert self.sink.positions(["a"]).shards["a"] == FIRST
        proxy.before = self.hang
        self.hung = False

    def hang(self, request: Request) -> None:
        if request.method == "PUT" and request.path.endswith(entry_path(2)) and not self.hung:
            self.hung = True
            self.meanwhile()
            self.clock.now += self.seconds

    def meanwhile(self) -> None:
        other = committer(self.uri, storage_options=self.direct)
        for number in (1, 2, 3):
            one = entry("b", number, other.positions(["b"]).shards["b"])
            assert commit_entries(other, self.table_id, self.written(100 + number), [one]).version
        newest = self.table()
        newest.create_checkpoint()
        storage = open_storage(self.uri, self.direct)
        for version in range(newest.version()):
            storage.delete(entry_path(version))

    def commit(self) -> int | None:
        return commit_entries(
            self.sink, self.table_id, self.written(2), [entry("a", 2, FIRST)]
        ).version

    def written(self, ident: int) -> Batch:
        rows = pa.table({"id": pa.array([ident], pa.int64())})
        writer = ArrowBatchWriter(None, self.uri, storage_options=self.direct)
        return writer.write(Batch("b", (), rows))

    def table(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=self.direct | {"AWS_ALLOW_HTTP": "true"})

    def ids(self) -> list[Any]:
        return sorted(self.table().to_pyarrow_table()["id"].to_pylist())

    def stored(self) -> StoredPosition:
        return committer(self.uri, storage_options=self.direct).positions(["a"]).shards["a"]


def test_a_commit_that_hung_is_in_the_table(endpoint: str, proxy: S3Proxy) -> None:
    world = HungWrite(endpoint, proxy, seconds=61)
    version = world.commit()
    assert world.hung
    assert version is not None
    assert world.ids() == [1, 2, 101, 102, 103]
    assert world.stored() == entry("a", 2, FIRST).becomes


def test_an_end_that_hung_is_in_the_table(endpoint: str, proxy: S3Proxy) -> None:
    world = HungWrite(endpoint, proxy, seconds=3_600)
    end = entry_of("a", FIRST, FIRST.position, ended=True)
    assert commit_entries(world.sink, world.table_id, NOTHING, [end]).version is not None
    assert world.hung
    assert world.stored() == end.becomes


def test_a_slow_commit_without_other_writers_lands_once(endpoint: str, proxy: S3Proxy) -> None:
    world = HungWrite(endpoint, proxy, seconds=61)
    world.meanwhile = lambda: None  # type: ignore[method-assign]
    assert world.commit() == 2
    assert world.ids() == [1, 2]
    assert world.table().version() == 2


@pytest.mark.parametrize("seconds", [61, 3_600])
def test_an_idle_worker_notices_that_the_next_entry_was_removed(
    tmp_path: Path, seconds: float
) -> None:
    """A clean-up that ended half-way has left the entry that the worker has read last."""
    uri, clock = str(tmp_path / "table"), Hours()
    first = committer(uri)
    first.ensure(SCHEMA)
    assert first.land(written(uri, 1), [entry("a", 1)]).version == 1
    sink = DeltaCommitter(DeltaSink(uri), "app", clock=clock, rng=random.Random(1))
    table_id = sink.positions(["a"]).table_id
    for number in (1, 2):
        landed = first.land(written(uri, number + 1), [entry("b", number, seq(number - 1))])
        assert landed.version == number + 1
    DeltaTable(uri).create_checkpoint()
    (tmp_path / "table" / entry_path(2)).unlink()
    clock.now += seconds
    outcome = commit_entries(sink, table_id, written(uri, 4), [entry("a", 2, FIRST)])
    assert outcome.version == 4
    assert ids(uri) == [1, 2, 3, 4]
