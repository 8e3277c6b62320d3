"""A stream to a new object: it is there once it is complete, and never in part."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.delta.files import write_table
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.storage import Storage
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.sinks.log import UnsafeObjectError
from tests.support.delta_tables import put

BUCKET = "storage-of-parts"  # bucket names are global, and other tests have theirs in this process
OPTIONS = {
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    keys = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "region_name": "us-east-1",
    }
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
        assert storage.size("a/b.bin") is None
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
    assert storage.size("a/b.bin") is None
    assert storage.list("") == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_size_of_a_file_is_what_is_stored(storage: Storage) -> None:
    table = pa.table(
        {
            "id": pa.array(range(50_000), pa.int64()),
            "data": pa.array([b"%d" % i for i in range(50_000)], pa.binary()),
        }
    )
    (file,) = write_table(storage, "batch", table, (), modified_millis=7)
    assert [(one.path, one.size) for one in storage.list("batch")] == [(file.path, file.size)]
    with storage.open(file.path) as stream:
        assert pq.read_table(stream).equals(table)


def test_a_limit_is_a_limit(storage: Storage) -> None:
    put(storage, "a/b.json", b"x" * 100)
    assert storage.read("a/b.json", 100) == b"x" * 100
    with pytest.raises(UnsafeObjectError, match="more than 99 bytes"):
        storage.read("a/b.json", 99)
    assert storage.size("a/b.json") == 100
    assert storage.size("a") is None
    for number in range(5):
        put(storage, f"a/{number}.json", b"")
    assert len(storage.list("a", 3)) == 3


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    """A table's folder with an object in it, next to a folder that is none of the table's."""
    for name in ("table/inside", "private"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "one.json").write_text("1")
    return open_storage(str(tmp_path / "table"))


def symbolic_link_to_a_file(inside: Path) -> str:
    (inside / "link.json").symlink_to("../../private/one.json")
    return "inside/link.json"


def symbolic_link_to_a_folder(inside: Path) -> str:
    (inside.parent / "link").symlink_to("../private")
    return "link/one.json"


def steps_out_of_the_table(_inside: Path) -> str:
    return "inside/../../private/one.json"


def an_absolute_path(inside: Path) -> str:
    return str(inside.parent.parent / "private/one.json")


@pytest.mark.parametrize(
    "make",
    [
        symbolic_link_to_a_file,
        symbolic_link_to_a_folder,
        steps_out_of_the_table,
        an_absolute_path,
    ],
)
def test_nothing_outside_of_the_table_is_touched(
    folder: Storage, tmp_path: Path, make: Callable[[Path], str]
) -> None:
    path = make(tmp_path / "table/inside")
    with pytest.raises(UnsafeObjectError):
        folder.read(path)
    assert folder.size(path) is None
    with suppress(UnsafeObjectError):
        folder.delete(path)
    assert (tmp_path / "private/one.json").read_text() == "1"
    listed = [stored.path for stored in folder.list("")]
    assert [one for one in listed if one.endswith("one.json")] == ["inside/one.json"]


def test_a_folder_that_is_a_link_is_not_listed(folder: Storage, tmp_path: Path) -> None:
    symbolic_link_to_a_folder(tmp_path / "table/inside")
    with pytest.raises(UnsafeObjectError):
        folder.list("link")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "socket", "folder"])
def test_what_is_no_regular_file_is_an_error_at_once(
    folder: Storage, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table/inside/other.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(path.parent)  # a socket's name is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    with pytest.raises(UnsafeObjectError, match=r"other\.json is not a regular file"):
        folder.read("inside/other.json")
    assert folder.size("inside/other.json") is None


def test_what_a_killed_process_was_writing_is_found_by_vacuum(tmp_path: Path) -> None:
    """Names that begin with a dot are hidden from it."""
    storage = open_storage(str(tmp_path / "table"))
    with storage.create("a/b.bin") as stream:
        stream.write(b"one")
        assert [path.name for path in (tmp_path / "table/a").iterdir()] == ["b.bin.partial"]
