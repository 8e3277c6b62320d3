"""From rows to verdicts."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.events import RowRejected, ignore_events
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.state.worker_status import PausedLease, UnavailableStream, WorkerStatus
from kcl_pipeline.orchestration.assets.checks import health
from kcl_pipeline.orchestration.assets.checks.definitions import (
    find_unavailable_streams,
    find_unrenewed_leases,
    observe_live_workers,
)
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.model import KinesisModel
from tests.support.dagster_fakes import FakeLeaseTable, FakeWorkerTable, ManualClock, leases, worker
from tests.support.streams_world import ForbiddenStreams


@given(count=st.integers(2, 40), data=st.data())
def test_without_any_one_lease_its_hash_keys_are_named(count, data):
    rows = leases(count, ["a"])
    assert health.coverage(rows, ["orders"]).passed
    lost = rows.pop(data.draw(st.integers(0, count - 1)))
    verdict = health.coverage(rows, ["orders"])
    assert not verdict.passed
    assert f"{lost.hash_key_range.start} to {lost.hash_key_range.end}" in verdict.description


def test_a_finished_parent_does_not_cover():
    rows = leases(2, ["a"])
    rows[1] = rows[1].with_(checkpoint=SHARD_END)
    assert not health.coverage(rows, ["orders"]).passed
    assert not health.coverage([], ["orders"]).passed


def test_coverage_is_judged_stream_by_stream():
    rows = leases(2, ["a"], "123:orders:1") + leases(2, ["a"], "123:clicks:2")
    assert health.coverage(rows, ["orders", "clicks"]).passed
    hole = health.coverage(rows[:-1], ["orders", "clicks"])
    assert (hole.passed, hole.metadata["holes"]) == (False, 1)
    assert "123:clicks:2" in hole.description
    missing = health.coverage(rows[:2], ["orders", "clicks"])
    assert not missing.passed
    assert "no lease at all" in missing.description


def test_only_a_stream_that_cannot_be_listed_is_unavailable():
    model = KinesisModel(VirtualClock())
    for name in ("orders", "denied"):
        model.create_stream(name, 2)
    kinesis = ForbiddenStreams(model, "denied")
    found = find_unavailable_streams(kinesis, ("orders", "gone", "denied"), multi_stream=True)
    assert [one.stream for one in found] == ["gone", "denied"]
    verdict = health.streams(found)
    assert (verdict.passed, verdict.metadata["unavailable"]) == (False, 2)
    assert "denied: denied" in verdict.description
    assert "gone: " in verdict.description
    assert "orders" not in verdict.description
    assert "IAM policy" in verdict.description
    assert health.streams(()).passed


def test_many_unavailable_streams_are_counted():
    many = [UnavailableStream(f"s{number}", "gone.") for number in range(60)]
    verdict = health.streams(many)
    assert verdict.description.startswith("60 streams are not read: s0: gone; s1: gone; s10: gone;")
    assert "; and 57 more. Create the stream" in verdict.description
    assert ".." not in verdict.description
    assert len(verdict.metadata["streams"].records) == 50


def test_stuck_names_the_longest_waiting_first():
    verdict = health.stuck({"a": 10, "b": 99, "c": 50}, 40)
    assert not verdict.passed
    assert verdict.description.endswith(f"b, c. {health.STUCK_ADVICE}")
    assert health.stuck({"a": 40}, 40).passed


@pytest.mark.parametrize(
    ("owners", "cpus", "passed"),
    [
        (["a", "b"], (None, None), True),
        (["a", "a", "a", "b"], (None, None), False),
        (["a", "a", "a", "b"], (50.0, 52.0), True),
        (["a", "a", "a", "b"], (80.0, 30.0), False),
        (["a"], (10.0, 10.0), False),
        ([None], (10.0, 10.0), True),
    ],
)
def test_balance(owners, cpus, passed):
    workers = [worker("a", cpus[0]), worker("b", cpus[1])]
    assert health.balance(leases(8, owners), workers, 10).passed is passed


def test_even_throughput_is_balanced_whatever_the_counts():
    rows = leases(4, ["a", "b", "b", "b"])
    rows[0] = rows[0].with_(throughput_kbps=30.0)
    assert health.balance(rows, [worker("a"), worker("b")], 10).passed
    assert not health.balance(
        [le.with_(throughput_kbps=None) for le in rows], [worker("a"), worker("b")], 10
    ).passed


def test_one_worker_is_always_balanced():
    assert health.balance(leases(4, ["a"]), [worker("a")], 10).passed
    assert health.balance([], [], 10).passed


@pytest.mark.parametrize(("millis", "passed"), [(None, False), (60_000, True), (60_001, False)])
def test_lag(millis, passed):
    assert health.lag(millis, 60).passed is passed


def test_the_age_of_a_lag_is_shown():
    assert "1.5 s behind the end of the stream, reported 41 s ago" in (
        health.lag(1_500, 60, age_seconds=41.2).description
    )
    assert "s ago" not in health.lag(None, 60, age_seconds=41.2).description


def test_no_shard_is_paused():
    assert health.paused([worker("a")]).passed
    pause = PausedLease("s-1", "the transform fails", 61.2)
    verdict = health.paused(
        [worker("a"), replace(worker("b"), status=WorkerStatus(paused=(pause,), paused_leases=30))]
    )
    assert not verdict.passed
    assert verdict.severity is dg.AssetCheckSeverity.ERROR
    assert verdict.description == (
        f"30 shards are paused; the first, s-1: the transform fails. {health.PAUSED_ADVICE}"
    )
    (row,) = verdict.metadata["shards"].records
    assert row.data == {
        "lease": "s-1",
        "worker": "b",
        "seconds": 61,
        "reason": "the transform fails",
    }


@pytest.mark.parametrize("millis", [None, 0])
def test_a_shard_that_stands_still_fails_the_check_whatever_the_lag_is(millis):
    """A child that waits, or an end that cannot be recorded, has no lag."""
    verdict = health.lag(millis, 60, 2)
    assert not verdict.passed
    assert "stalled shards: 2" in verdict.description
    assert verdict.metadata["stalled_shards"] == 2


def test_the_button_sees_who_is_renewed_by_looking_again():
    rows = leases(4, ["a", "dead", None, "a"])
    table = FakeLeaseTable(rows)
    clock = ManualClock()

    def world() -> None:
        table.leases = [
            le.with_(counter=le.counter + 1) if le.owner != "dead" else le for le in table.leases
        ]

    clock.on_sleep = world
    waits = find_unrenewed_leases(table, 10.0, clock)
    assert set(waits) == {rows[1].lease_key, rows[2].lease_key}
    assert min(waits.values()) >= 10
    assert not health.stuck(waits, 5.0).passed


def test_a_healthy_table_is_not_looked_at_for_longer_than_needed():
    table = FakeLeaseTable(leases(2, ["a"]))
    clock = ManualClock(0.0)
    clock.on_sleep = lambda: setattr(
        table, "leases", [le.with_(counter=le.counter + 1) for le in table.leases]
    )
    assert find_unrenewed_leases(table, 10.0, clock) == {}
    assert clock.now == 1.0


def test_only_workers_whose_row_moves_are_living():
    table = FakeWorkerTable([worker("a"), worker("dead")])
    clock = ManualClock(0.0)
    clock.on_sleep = lambda: table.beat("a")
    rejected = RejectedRows(ignore_events)
    assert [w.worker_id for w in observe_live_workers(table, 20.0, clock, rejected)] == ["a"]


def test_a_worker_row_that_cannot_be_read_is_reported_once_by_the_checks():
    table = FakeWorkerTable([worker("a")])
    table.bad_rows = [BadRow("workers", "b", "lut is 'x'", "1")]
    events, clock = [], ManualClock(0.0)
    rejected = RejectedRows(events.append)
    for _ in range(2):
        assert observe_live_workers(table, 5.0, clock, rejected) == ()
    assert events == [RowRejected("workers", "b", "lut is 'x'")]
    table.bad_rows = [BadRow("workers", "b", "sts is 'x'", "1")]
    observe_live_workers(table, 5.0, clock, rejected)
    assert len(events) == 2
