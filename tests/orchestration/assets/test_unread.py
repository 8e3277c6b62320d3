"""The checks of unread records: retention, and checkpoints that do not move."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from kcl_pipeline.events import ignore_events
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.state.worker_status import LeaseLag, WorkerStatus
from kcl_pipeline.orchestration.assets.checks.unread import (
    CHECKPOINTS_ADVICE,
    POLL_SECONDS,
    RETENTION_ADVICE,
    checkpoints,
    observe_checkpoints,
    retention,
    retention_by_stream,
    unread_seconds,
)
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.text import duration_text
from tests.support.dagster_fakes import FakeLeaseTable, FakeWorkerTable, ManualClock, leases, worker

HOUR = 3_600.0
DAY = {"orders": 24 * HOUR}
LIMITS = CheckLimits()


def aged(hours: float, count: int = 2):
    """Leases of a live worker, the last of which was read up to `hours` before `HOUR`."""
    rows = [row.with_(read_up_to_millis=round(HOUR * 1e6)) for row in leases(count, ["w"])]
    rows[-1] = rows[-1].with_(read_up_to_millis=round((1000 - hours) * HOUR * 1000))
    return rows


def judged(rows, period=None, limits=LIMITS):
    unread = unread_seconds(rows, [replace(worker("w"), status=WorkerStatus())], 1000 * HOUR)
    return retention(rows, unread, DAY if period is None else period, limits)


@pytest.mark.parametrize(
    ("hours", "severity", "text"),
    [
        (2.0, None, "orders: 22.0 h until records are lost; its oldest unread record is 2.0 h old"),
        (12.0, None, "orders: 12.0 h until"),
        (12.1, dg.AssetCheckSeverity.WARN, "orders: 11.9 h until records are lost"),
        (21.5, dg.AssetCheckSeverity.ERROR, "orders: 2.5 h until records are lost"),
        (25.0, dg.AssetCheckSeverity.ERROR, "orders: unread records leave the retention period"),
    ],
)
def test_retention_warns_and_fails_in_time(hours, severity, text):
    verdict = judged(aged(hours))
    assert verdict.passed is (severity is None)
    assert severity in (None, verdict.severity)
    assert verdict.description.startswith(text)
    assert verdict.description.endswith(f". {RETENTION_ADVICE}") is (severity is not None)
    assert verdict.metadata["hours_left"] == pytest.approx(24 - hours, abs=0.01)
    (row,) = (record.data for record in verdict.metadata["streams"].records)
    assert row["shard"] == "shardId-000000000001"


def test_the_limits_of_retention_are_settings():
    limits = CheckLimits(retention_warn_seconds=HOUR, retention_error_seconds=60)
    assert judged(aged(22.5), limits=limits).passed
    assert judged(aged(23.5), limits=limits).severity is dg.AssetCheckSeverity.WARN
    assert judged(aged(22.5), {"orders": 48 * HOUR}).passed


def test_each_stream_has_its_own_retention_and_the_most_urgent_comes_first():
    def stream(name: str, hours: float):
        prefix = f"1:{name}:5"
        millis = round((1000 - hours) * HOUR * 1000)
        return [row.with_(read_up_to_millis=millis) for row in leases(1, ["w"], prefix)]

    rows = [*stream("clicks", 30), *stream("orders", 20), *stream("unknown", 900)]
    periods = retention_by_stream(
        [
            StreamId("clicks", "1", 5, retention_hours=48),
            StreamId("orders", "1", 5, retention_hours=24),
            StreamId("unknown", "1", 5),
        ]
    )
    verdict = judged(rows, periods)
    assert not verdict.passed
    assert [row.data["stream"] for row in verdict.metadata["streams"].records] == [
        "orders",
        "clicks",
    ]
    assert verdict.metadata["hours_left"] == 4.0


def test_nothing_known_passes_and_says_so():
    verdict = judged(leases(3, ["w"]))
    assert verdict.passed
    assert verdict.description == "the age of unread records is not known yet"
    assert verdict.metadata["leases_without_age"] == 3


def test_the_age_is_the_lag_of_the_owner_or_the_time_in_the_lease_row():
    rows = aged(5.0, 5)
    key = [row.lease_key for row in rows]
    rows[0] = rows[0].with_(owner="w")
    rows[1] = rows[1].with_(owner=None, read_up_to_millis=round(998 * HOUR * 1000))
    rows[2] = rows[2].with_(owner="java")
    rows[3] = rows[3].with_(checkpoint=SHARD_END)
    own = replace(worker("w"), status=WorkerStatus(lags=(LeaseLag(key[0], 7_000),)))
    found = unread_seconds(rows, [own, worker("java")], 1000 * HOUR)
    assert found == {key[0]: 7.0, key[1]: 2 * HOUR, key[4]: 5 * HOUR}


def test_a_checkpoint_that_stands_still_fails_only_while_records_wait():
    rows = leases(4, ["w"])
    key = [row.lease_key for row in rows]
    rows[3] = rows[3].with_(checkpoint=SHARD_END)
    unchanged = {key[0]: 901.0, key[1]: 901.0, key[2]: 900.0, key[3]: 9_999.0}
    idle = {key[0]: 3.0, key[1]: 900.0, key[2]: 9_999.0, key[3]: 9_999.0}
    assert checkpoints(rows, unchanged, idle, 900.0).passed
    verdict = checkpoints(rows, unchanged, idle | {key[1]: 5_400.0}, 900.0)
    assert not verdict.passed
    assert verdict.severity is dg.AssetCheckSeverity.ERROR
    assert verdict.description == (
        "the checkpoints of 1 shard have not changed for more than 15 min while records wait. The "
        f"first, {key[1]} of worker w: its oldest unread record is 90 min old. {CHECKPOINTS_ADVICE}"
    )


def test_an_execution_waits_only_for_shards_with_old_records():
    clock, rows, rejected = ManualClock(1000 * HOUR), aged(1.0), RejectedRows(ignore_events)
    workers = FakeWorkerTable([replace(worker("w"), status=WorkerStatus())])
    fresh = FakeLeaseTable([row.with_(read_up_to_millis=10**12) for row in rows])
    assert observe_checkpoints(fresh, workers, 900.0, clock, rejected).passed
    assert clock.now == 1000 * HOUR
    stuck = FakeLeaseTable(rows)
    assert not observe_checkpoints(stuck, workers, 900.0, clock, rejected).passed
    assert 900 < clock.now - 1000 * HOUR <= 900 + 2 * POLL_SECONDS
    clock.now = 1000 * HOUR

    def move() -> None:
        stuck.leases[-1] = rows[-1].with_(checkpoint=Position("77"))

    clock.on_sleep = move
    assert observe_checkpoints(stuck, workers, 900.0, clock, rejected).passed
    assert clock.now - 1000 * HOUR == POLL_SECONDS


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (300, "5 min"), (7_200, "2.0 h")]
)
def test_times_as_text(seconds, text):
    assert duration_text(seconds) == text
