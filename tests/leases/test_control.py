"""The request of an operator in the client-version row, on both stores."""

from __future__ import annotations

import pytest

from kcl_pipeline.leases.application import Pause
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.workers import WorkerMetrics
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401

ANN, BOB = Pause("ann", 1_000, "first"), Pause("bob", 2_000, "second")


@pytest.fixture(name="started")
def started_fixture(tables):
    ensure_client_version(tables.coordinator, "w1", tables.clock)
    return tables


def test_a_pause_replaces_only_what_was_read(started):
    table = started.coordinator
    before = table.read_control()
    assert table.put_pause(ANN, replacing=before)
    assert table.put_pause(ANN, replacing=before), "the answer of the same write was lost"
    assert not table.put_pause(BOB, replacing=before)
    paused = table.read_control()
    assert paused.pause == ANN
    assert table.put_pause(None, replacing=paused)
    assert table.put_pause(None, replacing=paused), "the answer of the same write was lost"
    assert table.put_pause(BOB, replacing=before)
    assert not table.put_pause(None, replacing=paused), "another pause than the one that was read"
    assert table.read_control().pause == BOB


def test_without_a_client_version_row_nothing_is_stored(tables):
    table = tables.coordinator
    assert not table.put_pause(ANN, replacing=table.read_control())
    assert tables.rows(table) == {}


def test_the_reason_of_a_drain_ends_with_the_run(tables):
    table = tables.workers
    table.report(WorkerMetrics("w1", 1, run_id="a"))
    assert table.request_drain("w1", for_pause=True)
    assert table.report(WorkerMetrics("w1", 2, run_id="a")).drains_for_pause
    assert table.request_drain("w1")
    found = table.report(WorkerMetrics("w1", 3, run_id="a"))
    assert (found.drain_requested, found.drains_for_pause) == (True, False)
    assert table.request_drain("w1", for_pause=True)
    found = table.report(WorkerMetrics("w1", 4, run_id="b"))
    assert (found.drain_requested, found.drains_for_pause) == (False, False)
