"""A stream to a new object: it is there once it is complete, and never in part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.spark.files import write_table
from kcl_pipeline.spark.storage import Storage, open_storage

BUCKET = "storage-of-parts"  # bucket names are global, and other tests have theirs in this process
OPTIONS = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    with EmbeddedAws() as aws:
        boto3.client("s3", endpoint_url=aws.endpoint_url, **keys).create_bucket(Bucket=BUCKET)
        yield OPTIONS | {"AWS_ENDPOINT_URL": aws.endpoint_url}


@pytest.fixture(params=["local", "store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "table"))
    return open_storage(f"s3://{BUCKET}/{request.node.name}", request.getfixturevalue("bucket"))


def test_an_object_is_there_once_it_is_complete(storage: Storage) -> None:
    with storage.create("a/b.bin") as stream:
        stream.write(b"one")
        assert stream.tell() == 3
        assert not storage.exists("a/b.bin")
        assert storage.list("a") == []
    assert storage.read("a/b.bin") == b"one"
    with storage.create("a/b.bin") as stream:
        stream.write(b"two, and longer")
        assert storage.read("a/b.bin") == b"one"
    assert storage.read("a/b.bin") == b"two, and longer"


def test_an_error_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    def interrupted() -> None:
        with storage.create("a/b.bin") as stream:
            stream.write(b"one")
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        interrupted()
    assert not storage.exists("a/b.bin")
    assert storage.list("") == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_size_of_a_file_is_what_is_stored(storage: Storage) -> None:
    table = pa.table({"id": pa.array(range(50_000), pa.int64()), "data": pa.array([b"%d" % i for i in range(50_000)], pa.binary())})
    (file,) = write_table(storage, "batch", table, (), modified_millis=7)
    assert [(one.path, one.size) for one in storage.list("batch")] == [(file.path, file.size)]
    with storage.open(file.path) as stream:
        assert pq.read_table(stream).equals(table)
