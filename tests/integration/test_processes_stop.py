"""SIGTERM while a call hangs: the leases are released, and the process has ended, within 10 s."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.aws_proxy import AwsProxy, AwsRequest, aws_proxy
from tests.support.fleet_processes import CLOCK, Fleet, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SHARDS = 4
KEYS = [f"shardId-{number:012}" for number in range(SHARDS)]
FAILOVER_SECONDS = 8.0
STOP_TIMEOUT_SECONDS = 2.0
"""As in tests/pipelines/stopping.py."""
ALL_SECONDS = 10.0
LONG = pytest.mark.long


@dataclass
class Watch:
    """Looks at the counters of the leases from outside, until it is stopped.

    Attributes:
        longest: Longest time without a change of a counter of a lease that is held, by key.
        looked: Set after the first look.
    """

    fleet: Fleet
    longest: dict[str, float] = field(default_factory=dict)
    looked: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        since: dict[str, tuple[object, float]] = {}
        while True:
            now = CLOCK.monotonic()
            for key, row in self.fleet.leases().items():
                if "leaseOwner" not in row:
                    since.pop(key, None)
                    continue
                if since.get(key, (None, 0.0))[0] != row["leaseCounter"]:
                    since[key] = (row["leaseCounter"], now)
                self.longest[key] = max(self.longest.get(key, 0.0), now - since[key][1])
            self.looked.set()
            if self.stop.wait(0.2):
                return


@dataclass
class Stage:
    fleet: Fleet
    proxy: AwsProxy
    folder: Path

    def put(self, count: int = 50) -> None:
        records = [
            {"Data": json.dumps({"n": n}).encode(), "PartitionKey": f"k{n}"} for n in range(count)
        ]
        self.fleet.kinesis.put_records(StreamName="events", Records=records)

    def start(self, pipeline: str) -> None:
        self.fleet.start("w-1", f"stopping:{pipeline}")
        wait_until(lambda: self.fleet.owners() == {"w-1": set(KEYS)}, 120, "all leases")

    def hang(self, hangs: Callable[[AwsRequest], bool]) -> None:
        self.proxy.hang(hangs)
        self.put()
        assert self.proxy.entered.wait(30), "no call hangs"

    def end(self, limit: float = ALL_SECONDS) -> dict[str, float]:
        """SIGTERM; wait for the end; return the longest times without a renewal."""
        watch = Watch(self.fleet)
        thread = threading.Thread(target=watch.run, daemon=True)
        thread.start()
        assert watch.looked.wait(30), "the leases cannot be read"
        began = CLOCK.monotonic()
        log = self.folder / "w-1.log"
        self.fleet.send("w-1", signal.SIGTERM)
        wait_until(lambda: "worker w-1 stopped" in log.read_text(), 90, "the end of the worker")
        seconds = CLOCK.monotonic() - began
        # Python frees its modules, which takes seconds only on a machine that is overloaded
        code = self.fleet.workers.pop("w-1").wait(60)
        watch.stop.set()
        thread.join()
        assert seconds < limit, f"{seconds:.1f} s\n{self.fleet.logs()}"
        assert code == 0, self.fleet.logs()
        return watch.longest

    def free(self) -> set[str]:
        return {key for key, row in self.fleet.leases().items() if "leaseOwner" not in row}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with EmbeddedAws() as aws, aws_proxy(aws.endpoint_url) as proxy:
        fleet = Fleet(aws, tmp_path)
        fleet.environment["AWS_ENDPOINT_URL"] = proxy.url
        s3 = boto3.client(
            "s3", endpoint_url=aws.endpoint_url, aws_access_key_id="a", aws_secret_access_key="b"
        )
        s3.create_bucket(Bucket="stopping")
        fleet.kinesis.create_stream(StreamName="events", ShardCount=SHARDS)
        try:
            yield Stage(fleet, proxy, tmp_path)
        finally:
            fleet.close()


def test_while_get_records_hangs(stage: Stage):
    stage.start("table")
    stage.hang(lambda request: request.operation == "GetRecords")
    longest = stage.end()
    assert stage.free() == set(KEYS)
    assert max(longest.values()) < FAILOVER_SECONDS


@pytest.mark.parametrize("rows", [KEYS[:1], pytest.param(KEYS, marks=LONG)])
def test_while_writes_of_lease_rows_hang(stage: Stage, rows: list[str]):
    stage.start("table")

    def hangs(request: AwsRequest) -> bool:
        return request.operation == "UpdateItem" and any(
            key.encode() in request.body for key in rows
        )

    stage.hang(hangs)
    longest = stage.end()
    assert stage.free() == set(KEYS) - set(rows)
    assert all(longest[key] < FAILOVER_SECONDS for key in set(KEYS) - set(rows))


@pytest.mark.parametrize("what", ["_delta_log", pytest.param("parquet", marks=LONG)])
def test_while_the_store_hangs(stage: Stage, what: str):
    stage.start("store")
    stage.put()
    stage.hang(lambda request: request.operation.startswith("PUT") and what in request.operation)
    longest = stage.end()
    assert stage.free() == set(KEYS)
    assert max(longest.values()) < FAILOVER_SECONDS


@pytest.mark.parametrize("pipeline", ["table", pytest.param("called", marks=LONG)])
def test_a_transform_and_a_function_that_hang_are_waited_for_and_then_abandoned(
    stage: Stage, pipeline: str
):
    stage.start(pipeline)
    (stage.folder / "hang").touch()
    stage.put()
    wait_until((stage.folder / "entered").exists, 30, "the call to hang")
    began = CLOCK.monotonic()
    longest = stage.end(STOP_TIMEOUT_SECONDS + ALL_SECONDS)
    assert CLOCK.monotonic() - began >= STOP_TIMEOUT_SECONDS
    assert stage.free() == set(KEYS)
    assert max(longest.values()) < FAILOVER_SECONDS
    assert "abandoned" in stage.fleet.logs()
