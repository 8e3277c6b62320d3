"""Which shard lags most, since when, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcl_pipeline.leases.state.worker_status import HungState, PausedLease, WorkerStatus
from kcl_pipeline.orchestration.assets.checks import health
from kcl_pipeline.orchestration.assets.checks.worst_shard import worst_shard
from kcl_pipeline.position import SHARD_END
from tests.support.dagster_fakes import leases, worker

ROWS = leases(4, ["a", "b"])
KEYS = [row.lease_key for row in ROWS]
NOON = 12 * 3_600.0
LATE = {KEYS[1]: 90.0, KEYS[2]: 300.0, KEYS[3]: 60.0}
BEGIN = "shardId-000000000002 of worker a lags most, since 11:55:00 UTC (5 min): "


def sentence(status=None, rows=ROWS, unread=LATE, unchanged=None, waits=None):
    workers = [replace(worker("a"), status=status), worker("b")]
    return worst_shard(rows, workers, unread, unchanged or {}, waits or {}, 60.0, NOON)


@pytest.mark.parametrize(
    ("status", "given", "cause"),
    [
        (
            WorkerStatus(paused=(PausedLease(KEYS[2], "16 of 16 records fail", 9.0),)),
            {},
            "it is paused: 16 of 16 records fail",
        ),
        (
            WorkerStatus(hung=HungState("writing", 133.0, 2)),
            {"unchanged": {KEYS[2]: 400.0}},
            "its worker is hung in step writing for 2 min",
        ),
        (
            WorkerStatus(failed_batches=3, failure="no space is left"),
            {},
            "the table refuses the batches of its worker: no space is left",
        ),
        (
            WorkerStatus(),
            {"unchanged": {KEYS[2]: 400.0}},
            "its checkpoint has not changed for 7 min: a batch takes long or is repeated",
        ),
        (None, {"waits": {KEYS[2]: 70.0}}, "it has had no live owner for 70 s"),
        (WorkerStatus(), {}, "its worker commits less than arrives, as on 2 of 4 shards"),
        (
            WorkerStatus(),
            {"rows": [*ROWS[:2], ROWS[2].with_(throughput_kbps=70.0), ROWS[3]]},
            "it is hot, with 70% of the throughput of 4 shards; split it",
        ),
    ],
)
def test_the_worst_shard_is_named_with_the_time_and_the_cause(status, given, cause):
    assert sentence(status, **given) == BEGIN + cause


def test_without_a_shard_above_the_threshold_there_is_no_sentence():
    assert sentence(unread={KEYS[0]: 60.0}) is None
    assert sentence(rows=[row.with_(checkpoint=SHARD_END) for row in ROWS]) is None


def test_a_failing_lag_check_has_the_sentence_and_one_that_passes_has_not():
    assert f". {BEGIN}. {health.LAG_ADVICE}" in health.lag(90_000, 60.0, worst=BEGIN).description
    assert BEGIN not in health.lag(50_000, 60.0, worst=BEGIN).description
