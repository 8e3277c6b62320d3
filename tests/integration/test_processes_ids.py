"""A worker id belongs to the process that started last."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.fleet_processes import Fleet, Publisher, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with EmbeddedAws() as aws:
        fleet = Fleet(aws, tmp_path)
        try:
            yield fleet
        finally:
            fleet.close()


def start_one(fleet: Fleet) -> Publisher:
    fleet.kinesis.create_stream(StreamName="events", ShardCount=3)
    fleet.start("w-1")
    publisher = Publisher(fleet, per_second=200)
    publisher.start()
    wait_until(lambda: fleet.rows.count() > 200, 90, "the first rows")
    return publisher


def test_a_process_whose_id_another_one_takes_ends_with_code_4_and_releases_nothing(fleet: Fleet):
    publisher = start_one(fleet)
    first = fleet.workers.pop("w-1")
    fleet.start("w-1")
    assert first.wait(60) == 4, fleet.logs()
    assert "another process has started under the worker id 'w-1'" in fleet.logs()
    assert fleet.owners().keys() == {"w-1"}
    before = fleet.rows.count()
    wait_until(lambda: fleet.rows.count() > before + 200, 60, "the other process to go on")
    comparison = publisher.finish()
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"
    assert fleet.end("w-1") == 0


def test_a_process_that_was_killed_is_started_again_under_its_id(fleet: Fleet):
    publisher = start_one(fleet)
    fleet.end("w-1", signal.SIGKILL)
    fleet.start("w-1")
    before = fleet.rows.count()
    wait_until(lambda: fleet.rows.count() > before + 200, 60, "the next process to go on")
    comparison = publisher.finish()
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"
    assert fleet.end("w-1") == 0, fleet.logs()


def test_of_two_processes_that_start_at_one_moment_one_goes_on(fleet: Fleet):
    fleet.kinesis.create_stream(StreamName="events", ShardCount=3)
    fleet.start("w-1")
    first = fleet.workers.pop("w-1")
    fleet.start("w-1")
    second = fleet.workers.pop("w-1")
    publisher = Publisher(fleet, per_second=200)
    publisher.start()
    try:
        wait_until(
            lambda: first.poll() is not None or second.poll() is not None,
            90,
            "the end of one of the two",
        )
        ended, other = (first, second) if first.poll() is not None else (second, first)
        assert ended.returncode == 4, fleet.logs()
    finally:
        fleet.workers["w-1"] = second if first.poll() is not None else first
    before = fleet.rows.count()
    wait_until(lambda: fleet.rows.count() > before + 200, 90, "the other process to go on")
    assert other.poll() is None, fleet.logs()
    comparison = publisher.finish()
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"
    assert fleet.end("w-1") == 0, fleet.logs()
