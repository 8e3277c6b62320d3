"""A quiet fleet of any size writes at most 120 asset events an hour (operations.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kcl_pipeline.worker_status import LeaseLag, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

MOST_PER_MINUTE = 2
FIRST_SECONDS = 600.0
TICK_SECONDS = 5.0


@pytest.mark.parametrize(
    ("streams", "shards", "workers", "minutes"),
    [
        pytest.param(2, 50, 8, 5),
        pytest.param(2, 50, 8, 60, marks=pytest.mark.long),
        pytest.param(1, 1, 1, 60, marks=pytest.mark.long),
        pytest.param(1, 1_000, 50, 60, marks=pytest.mark.long),
        pytest.param(30, 4, 8, 60, marks=pytest.mark.long),
    ],
)
def test_a_quiet_hour(instance, streams, shards, workers, minutes):
    """Workers report, renew and have nothing to read. Materializations, observations and checks."""
    names = [f"w-{number}" for number in range(workers)]
    streams_of = [f"orders-{number}" for number in range(streams)]
    rows = [
        row
        for name in streams_of
        for row in leases(shards, names, None if streams == 1 else f"1:{name}:1")
    ]
    kinds: Counter[str] = Counter()

    def report(tick: int):
        found = []
        for name in names:
            mine = [row.lease_key for row in rows if row.owner == name]
            seconds = 3_600.0 + TICK_SECONDS * tick
            totals = WorkerTotals(seconds, 1_000, 9_000, 1_000, 10)
            lags = tuple(LeaseLag(key, 100) for key in mine[:20])
            status = WorkerStatus(
                100,
                lags=lags,
                more_lags=len(mine) - len(lags),
                totals=totals,
                last_batch_seconds=seconds,
            )
            written = int(1_000_000 + TICK_SECONDS * tick)
            found.append(replace(worker(name, 20.0), last_update_seconds=written, status=status))
        return led([row.with_(counter=tick) for row in rows], found)

    cycle = FakeCycle([report(0)])
    pipeline = FakePipeline(streams=tuple(streams_of), cycle=cycle)
    stage = Stage(instance, pipeline)
    first = int(FIRST_SECONDS / TICK_SECONDS)
    for tick in range(first + int(60 * minutes / TICK_SECONDS)):
        cycle.reports = [report(tick)]
        stage.workers.rows = {row.worker_id: row for row in cycle.reports[0].workers}
        for event in stage(TICK_SECONDS).asset_events:
            if tick >= first:  # the first minutes tell everything once
                kinds[getattr(event, "check_name", "/".join(event.asset_key.path))] += 1
    reported = kinds["orders-eu/per_minute"]
    assert reported in (minutes, minutes + 1), "the output is reported once a minute"
    assert kinds.total() <= MOST_PER_MINUTE * minutes, kinds
