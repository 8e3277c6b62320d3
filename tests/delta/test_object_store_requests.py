"""What an attempt to commit asks an object store for, counted by a proxy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import boto3
import pyarrow as pa
import pytest

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.sinks.announcements import FOLDER
from tests.support.announcing import announce, contend
from tests.support.delta_tables import (
    NONE,
    Committer,
    NoWait,
    commit_entries,
    committer,
    entry,
    seq,
)
from tests.support.s3_proxy import Request, S3Proxy, s3_proxy

BUCKET = "requests"
ANNOUNCED = 5
NOW_MILLIS = int(NoWait().wall() * 1000)
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def store() -> Iterator[tuple[S3Proxy, Mapping[str, str]]]:
    """A proxy before an empty bucket, and the options to reach it."""
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    with EmbeddedAws() as aws, s3_proxy(aws.endpoint_url) as proxy:
        boto3.client("s3", endpoint_url=aws.endpoint_url, **keys).create_bucket(Bucket=BUCKET)
        options = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
        }
        yield proxy, options


class Writers:
    """A table with a committer, and batches that others have announced."""

    def __init__(self, proxy: S3Proxy, options: Mapping[str, str]) -> None:
        self.proxy, self.options = proxy, options
        self.uri = f"s3://{BUCKET}/table"
        self.writer = ArrowBatchWriter(None, self.uri, storage_options=options)
        self.sink: Committer = committer(self.uri, storage_options=options)
        self.table_id = None
        self.sink.ensure(SCHEMA)
        self.turn = 0
        self.commit()

    def file(self, number: int):
        return self.writer.write(Batch("b", (), pa.table({"id": pa.array([number], pa.int64())})))

    def commit(self) -> list[Request]:
        """Commit, and return the requests of it."""
        table_id = self.sink.positions(["own"]).table_id
        written, expected = self.file(self.turn), seq(self.turn)
        self.turn += 1
        before = len(self.proxy.requests)
        assert commit_entries(
            self.sink, table_id, written, [entry("own", self.turn, expected)]
        ).version
        return self.proxy.requests[before:]

    def announce(self, first: int) -> None:
        for number in range(first, first + ANNOUNCED):
            announce(self.sink, self.file(100 + number).files, entry(f"o-{number}", 1))


def kinds(requests: list[Request]) -> Counter[str]:
    """Number of requests by their method and what they are for."""
    found: Counter[str] = Counter()
    for one in requests:
        path = one.path.strip("/")
        if path == BUCKET and one.method == "GET":
            found[f"list {'log' if '_delta_log' in one.query else 'announced'}"] += 1
        elif path == BUCKET:
            found["delete"] += 1
        else:
            folder = next((name for name in ("_delta_log", FOLDER) if name in path), "files")
            found[f"{one.method} {folder}"] += 1
    return found


def test_a_commit_alone_does_not_ask_for_announcements(store) -> None:
    writers = Writers(*store)
    writers.commit()
    # The last known entry, and the one that does not exist yet.
    assert kinds(writers.commit()) == {"GET _delta_log": 2, "PUT _delta_log": 1}


def test_an_attempt_lists_once_and_reads_what_is_new(store) -> None:
    """The first attempts lose; the announcements are asked for only once."""
    proxy, _ = store
    writers = Writers(*store)
    writers.announce(0)
    rival = committer(writers.uri, storage_options=writers.options)
    table_id = rival.positions([]).table_id
    attempts: list[int] = []

    def lose(request: Request) -> None:
        """Another writer is faster, twice."""
        if request.method == "PUT" and "_delta_log" in request.path and len(attempts) < 2:
            attempts.append(len(proxy.requests))
            proxy.before = lambda _: None
            number = len(attempts)
            mark = len(proxy.requests)
            landed = commit_entries(
                rival,
                table_id,
                writers.file(900 + number),
                [entry("rival", number, seq(number - 1))],
            )
            assert landed.version is not None
            del proxy.requests[mark:]
            proxy.before = lose

    contend(writers.sink)
    proxy.before = lose
    requests = writers.commit()
    assert len(attempts) == 2
    between = kinds(proxy.requests[attempts[0] : attempts[1]])
    assert between == {"GET _delta_log": 1, "PUT _delta_log": 1}, "else a lone writer always wins"
    found = kinds(requests)
    assert found[f"GET {FOLDER}"] == ANNOUNCED, "each announcement is read once"
    assert not found["HEAD files"], "files that were written just now are there"
    assert found["PUT _delta_log"] == 3
    assert found["list announced"] <= 3, "two turns are left to others, then once for what is new"
    assert {
        stored.number
        for stored in rival.positions(
            [f"o-{number}" for number in range(ANNOUNCED)]
        ).shards.values()
    } == {1}


def test_an_old_announced_file_is_asked_for(store) -> None:
    """The file of a forgotten announcement may have been removed by another program's vacuum."""
    writers = Writers(*store)
    old = [replace(one, modified_millis=NOW_MILLIS - 3_601_000) for one in writers.file(100).files]
    announce(writers.sink, old, entry("o-0", 1))
    writers.sink.delta_log.storage.delete(old[0].path)
    contend(writers.sink)
    requests = kinds(writers.commit())
    assert requests["HEAD files"] == 1
    assert writers.sink.positions(["o-0"]).shards["o-0"] == NONE
