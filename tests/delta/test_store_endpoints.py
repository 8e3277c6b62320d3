"""The log, the files and the announcements of a table are in one store, with the same keys.

A store at an endpoint of its own, keys that are replaced while a process runs, and a store without
conditional writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch
from kcl_pipeline.cli.doctor.sink import check_output
from kcl_pipeline.delta.dead_letters import count_dead_letters
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.maintenance import compact, table_exists
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.delta.storage import delta_options
from kcl_pipeline.errors import TableMismatchError
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.status.findings import FindingLevel
from tests.support.announcing import announce, contend
from tests.support.credential_files import ProfileFiles
from tests.support.delta_tables import NOTHING, commit_entries, committer, entry, entry_of
from tests.support.s3_proxy import S3Proxy, s3_proxy

SCHEMA = pa.schema([("id", pa.int64())])
BUCKET = "store-endpoints"


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


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileFiles:
    """A profile with keys, and no other variable of AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    found = ProfileFiles(tmp_path)
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    found.write("OLD")
    return found


def written(uri: str, ident: int) -> Batch:
    rows = pa.table({"id": pa.array([ident], pa.int64())})
    return ArrowBatchWriter(None, uri).write(Batch("b", (), rows))


def commit(sink: DeltaCommitter, uri: str, ident: int) -> int | None:
    expected = sink.positions(["a"])
    one = entry("a", expected.shards["a"].number + 1, expected.shards["a"])
    return commit_entries(sink, expected.table_id, written(uri, ident), [one]).version


def end(sink: DeltaCommitter) -> None:
    found = sink.positions(["a"])
    one = entry_of("a", found.shards["a"], None, ended=True)
    commit_entries(sink, found.table_id, NOTHING, [one])


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ENDPOINT_URL": "{proxy}"},
        {"AWS_ENDPOINT_URL_S3": "{proxy}"},
        {"AWS_ENDPOINT_URL_S3": "{proxy}", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    ],
    ids=["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "both"],
)
def test_everything_of_a_table_reaches_the_endpoint_of_the_environment(
    proxy: S3Proxy,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(proxy=proxy.url))
    uri = f"s3://{BUCKET}/{request.node.callspec.id}"
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert commit(sink, uri, 1) == 1
    announced = announce(committer(uri), written(uri, 2).files, entry("b", 1))
    contend(sink)
    assert commit(sink, uri, 3) == 2
    assert sink.positions(["b"]).shards["b"].number == 1, "the announced batch landed"
    puts = [path.removeprefix(f"/{uri.removeprefix('s3://')}/") for path in proxy.paths("PUT")]
    assert next(path for path in puts if path.endswith(".parquet")).startswith("batches/")
    assert announced.name in puts
    assert f"_delta_log/{2:020d}.json" in puts
    assert {one.key for one in proxy.requests} == {"OLD"}
    assert table_exists(uri)
    assert compact(uri).files_removed == 3
    assert count_dead_letters(f"{uri}_dead_letters", {}, 0.0) is None


def test_the_options_win(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    options = {
        "endpoint_url": proxy.url,
        "aws_access_key_id": "OWN",
        "AWS_SECRET_ACCESS_KEY": "s",
        "aws_default_region": "us-east-1",
        "max_retries": "1",
        "timeout": "20s",
    }
    uri = f"s3://{BUCKET}/options"
    sink = committer(uri, storage_options=options)
    sink.ensure(SCHEMA)
    rows = pa.table({"id": pa.array([1], pa.int64())})
    batch = ArrowBatchWriter(None, uri, storage_options=options).write(Batch("b", (), rows))
    assert commit_entries(sink, sink.positions([]).table_id, batch, [entry("a", 1)]).version == 1
    assert {one.key for one in proxy.requests} == {"OWN"}


def test_completed_options_are_enough_on_another_host(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor does not have the environment of the driver."""
    uri = f"s3://{BUCKET}/executors"
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    options = delta_options(uri, {"AWS_REGION": "eu-west-1"})
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with open_storage(uri, options).create("a/b.bin") as stream:
        stream.write(b"x")
    assert proxy.paths("PUT") == [f"/{BUCKET}/executors/a/b.bin"]


@pytest.mark.parametrize("own_keys", [True, False])
def test_a_role_is_assumed_for_the_files_as_for_the_log(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, own_keys: bool
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", proxy.url)
    uri = f"s3://{BUCKET}/role-{own_keys}"
    options = {"AWS_IAM_ROLE_ARN": "arn:aws:iam::123456789012:role/writer"}
    if own_keys:
        options |= {"AWS_ACCESS_KEY_ID": "OWN", "AWS_SECRET_ACCESS_KEY": "s"}
    storage = open_storage(uri, options)
    for number in range(3):
        with storage.create(f"{number}.bin") as stream:
            stream.write(b"x")
    keys = {one.key for one in proxy.requests if one.path.endswith(".bin")}
    assert len(keys) == 1
    assert not keys & {"OLD", "OWN"}
    (asked,) = [one for one in proxy.requests if one.method == "POST"]
    assert asked.key == ("OWN" if own_keys else "OLD")


def test_keys_that_are_replaced_are_used_without_a_restart(
    proxy: S3Proxy, files: ProfileFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    uri = f"s3://{BUCKET}/rotated"
    sink = committer(uri)
    writer = ArrowBatchWriter(None, uri)
    sink.ensure(SCHEMA)
    assert commit(sink, uri, 1) == 1
    files.write("NEW")
    proxy.keys = frozenset({"NEW"})
    found = sink.positions(["a"])
    one = entry("a", 2, found.shards["a"])
    rows = pa.table({"id": pa.array([2], pa.int64())})
    batch = writer.write(Batch("b", (), rows))
    assert commit_entries(sink, found.table_id, batch, [one]).version == 2
    files.write("NEWER")
    proxy.keys = frozenset({"NEWER"})
    assert commit(sink, uri, 3) == 3
    found = DeltaTable(
        uri, storage_options={"AWS_ALLOW_HTTP": "true", "AWS_FORCE_CREDENTIAL_LOAD": "true"}
    )
    assert sorted(found.to_pyarrow_table()["id"].to_pylist()) == [1, 2, 3]


def test_a_store_without_conditional_writes_is_refused(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    uri = f"s3://{BUCKET}/unconditional"
    proxy.conditional = False
    with pytest.raises(TableMismatchError, match=r"If-None-Match.*Use a store with conditional"):
        committer(uri).ensure(SCHEMA)
    assert not [path for path in proxy.paths("PUT") if "_delta_log" in path]
    proxy.conditional = True
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert commit(sink, uri, 1) == 1
    proxy.conditional = False
    proxy.requests.clear()
    for use in (
        lambda: commit(committer(uri), uri, 2),
        lambda: end(committer(uri)),
    ):
        with pytest.raises(TableMismatchError, match="If-None-Match"):
            use()
    assert not [path for path in proxy.paths("PUT") if "_delta_log" in path]
    (found,) = check_output(DeltaSink(uri), "app")
    assert found.level is FindingLevel.PROBLEM
    assert "If-None-Match" in found.sentence
    store = boto3.client("s3", endpoint_url=proxy.url).list_objects_v2(Bucket=BUCKET)
    assert not [one["Key"] for one in store["Contents"] if "/probe/" in one["Key"]]


def test_the_probe_is_made_once(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    uri = f"s3://{BUCKET}/probed"
    sink = committer(uri)
    sink.ensure(SCHEMA)
    for ident in (1, 2, 3):
        assert commit(sink, uri, ident) == ident
    assert len([path for path in proxy.paths("PUT") if "/probe/" in path]) == 2


def test_a_lock_in_dynamodb_is_no_substitute(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs ignores the option since its version 1.6."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.conditional = False
    sink = committer(f"s3://{BUCKET}/x", storage_options={"aws_s3_locking_provider": "dynamodb"})
    with pytest.raises(TableMismatchError, match="ignores conditional writes"):
        sink.ensure(SCHEMA)


@pytest.mark.parametrize("where", ["option", "environment"])
def test_unsafe_renames_are_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"aws_s3_allow_unsafe_rename": "true"} if where == "option" else {}
    if where == "environment":
        monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "TRUE")
    with pytest.raises(TableMismatchError, match="Leave the option out"):
        committer(f"s3://{BUCKET}/x", storage_options=options).ensure(SCHEMA)
