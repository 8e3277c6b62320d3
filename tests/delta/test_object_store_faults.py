"""Many writers of one table in an object store whose answers are lost, refused or too late.

The store is the S3 of the embedded AWS, and with `make test-s3` another server. A proxy before it
makes the faults.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from deltalake import DeltaTable

from kcl_pipeline.delta.maintenance import compact
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.local import EmbeddedAws
from tests.support.s3_proxy import Request, S3Proxy, s3_proxy
from tests.support.s3_writers import SCHEMA, key_of, write_at_once

BUCKET = "with-faults"
KEYS = {"aws_access_key_id": "k-test", "aws_secret_access_key": "s-test"}
START_SECONDS = 30.0

pytestmark = pytest.mark.timeout(300)


@contextmanager
def versitygw(folder: Path) -> Iterator[str]:
    """Run the S3 gateway of Versity on a folder. `make test-s3` installs it."""
    program = shutil.which("versitygw")
    if program is None:
        pytest.skip("versitygw is not installed")
    root, sidecar = folder / "objects", folder / "attributes"
    root.mkdir()
    sidecar.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = ["--access", KEYS["aws_access_key_id"], "--secret", KEYS["aws_secret_access_key"]]
    command = [program, *keys, "--port", f"127.0.0.1:{port}", "posix"]
    server = subprocess.Popen([*command, "--sidecar", str(sidecar), str(root)])
    try:
        deadline = time.monotonic() + START_SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, "versitygw has ended"
            assert time.monotonic() < deadline, "versitygw does not listen"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(START_SECONDS)


@pytest.fixture(params=["embedded", pytest.param("versitygw", marks=pytest.mark.s3_server)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S3Proxy]:
    """A proxy before an empty bucket."""
    is_embedded = request.param == "embedded"
    with (
        EmbeddedAws() if is_embedded else versitygw(tmp_path) as server,
        s3_proxy(
            server.endpoint_url if isinstance(server, EmbeddedAws) else server,
            keep_host=not is_embedded,
        ) as proxy,
    ):
        s3 = boto3.client("s3", endpoint_url=proxy.url, region_name="us-east-1", **KEYS)
        s3.create_bucket(Bucket=BUCKET)
        yield proxy


def options_of(proxy: S3Proxy) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
    }


IN_A_ROW = {"expired": 20}
"""How many requests in a row have the fault: credentials are refused until they are new."""


class Faults:
    """Gives some requests a fault, in an order that a seed decides, and counts them."""

    def __init__(self, kind: str, share: float) -> None:
        self.kind = kind
        self.count = 0
        self._in_a_row = IN_A_ROW.get(kind, 1)
        self._share = share / self._in_a_row
        self._left = 0
        self._rng = random.Random(1)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> str | None:
        with self._lock:
            if not self._left and self._rng.random() < self._share:
                self._left = self._in_a_row
            has_fault = self._left > 0
            self._left -= has_fault
            self.count += has_fault
        return self.kind if has_fault else None


def rows_of(uri: str, options: Mapping[str, str]) -> list[int]:
    table = DeltaTable(uri, storage_options=dict(options)).to_pyarrow_table()
    return sorted(table["id"].to_pylist())


def stored_numbers(uri: str, options: Mapping[str, str], name: str, writers: range) -> set[int]:
    sink = DeltaCommitter(DeltaSink(uri, storage_options=options), name)
    return {one.number for one in sink.positions([key_of(n) for n in writers]).shards.values()}


# A lost answer is the fault that can commit twice; `make test-long` has all, with more writers.
MANY = [pytest.param(kind, 32, marks=pytest.mark.long) for kind in ("lost", "slow down", "expired")]


@pytest.mark.parametrize(("kind", "count"), [("lost", 12), *MANY])
def test_with_many_writers_nothing_is_missing_or_doubled(
    store: S3Proxy, kind: str, count: int
) -> None:
    uri, options, writers = f"s3://{BUCKET}/table", options_of(store), range(1, count + 1)
    DeltaCommitter(DeltaSink(uri, storage_options=options), "app").ensure(SCHEMA)
    store.fault = faults = Faults(kind, 0.02)
    committed = write_at_once(uri, options, "app", writers, commits=3)
    store.fault = lambda _: None
    assert faults.count > 5, "there were not enough faults"
    assert rows_of(uri, options) == sorted(committed)
    assert stored_numbers(uri, options, "app", writers) == {3}


def test_two_fleets_and_a_compaction_share_a_table(store: S3Proxy) -> None:
    """Both fleets commit each other's batches, and neither stops the compaction."""
    uri, options = f"s3://{BUCKET}/shared", options_of(store)
    fleets = {"orders": range(1, 5), "returns": range(5, 9)}
    DeltaCommitter(DeltaSink(uri, storage_options=options), "orders").ensure(SCHEMA)
    over, removed = threading.Event(), []

    def keep_compacting() -> None:
        while not over.wait(0.05):
            removed.append(compact(uri, options).files_removed)

    with ThreadPoolExecutor(len(fleets) + 1) as pool:
        compaction = pool.submit(keep_compacting)
        ended = [
            pool.submit(write_at_once, uri, options, name, writers, 4)
            for name, writers in fleets.items()
        ]
        try:
            committed = [number for one in ended for number in one.result()]
        finally:
            over.set()
        compaction.result()
    assert sum(removed) > 0, "no compaction has merged files while they wrote"
    assert rows_of(uri, options) == sorted(committed)
    for name, writers in fleets.items():
        assert stored_numbers(uri, options, name, writers) == {4}
