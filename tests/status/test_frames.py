"""The tables of leases and workers as pandas DataFrames."""

from __future__ import annotations

import json
from dataclasses import asdict

import pandas as pd

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON
from kcl_pipeline.status.frames import lease_frame, records, worker_frame
from kcl_pipeline.status.rows import lease_rows, worker_rows
from kcl_pipeline.status.snapshot import Snapshot
from tests.support.dagster_fakes import worker


def lease(number, owner=None, **changes):
    return Lease(f"shardId-{number:012d}", TRIM_HORIZON, owner=owner, **changes)


def snapshot(leases=(), workers=()):
    return Snapshot(
        application="orders",
        at=1_000.0,
        period_seconds=10.0,
        streams=("orders",),
        leases=tuple(leases),
        workers=tuple(workers),
    )


FULL = snapshot(
    [
        lease(0, "a-1", throughput_kbps=1.5),
        lease(1, "a-1", throughput_kbps=2.0),
        lease(2).with_(checkpoint=SHARD_END),
        lease(3),
    ],
    [worker("a-1")],
)


def test_leases_are_grouped_by_worker_in_one_expression():
    frame = lease_frame(FULL)
    assert frame.groupby("worker")["kbps"].sum().to_dict() == {"a-1": 3.5}
    assert frame["state"].value_counts().to_dict() == {
        "owner is gone": 2,
        "ended": 1,
        "no owner": 1,
    }
    assert frame["kbps"].isna().sum() == 2


def test_workers_have_their_number_of_leases():
    frame = worker_frame(FULL, "-")
    assert frame[["worker_id", "group", "leases"]].to_numpy().tolist() == [["a-1", "a", 2]]


def test_the_rows_for_json_are_those_of_the_status():
    found = records(lease_frame(FULL)), records(worker_frame(FULL, "-"))
    rows = lease_rows(FULL), worker_rows(FULL, "-")
    assert json.dumps(found) == json.dumps([[asdict(row) for row in some] for some in rows])


def test_an_application_without_rows_has_the_columns():
    frame = lease_frame(snapshot())
    assert (len(frame), str(frame["kbps"].dtype)) == (0, "float64")
    assert str(worker_frame(snapshot(), "-")["leases"].dtype) == "int64"
    assert isinstance(frame, pd.DataFrame)
