"""A pipeline under `dagster dev`, used through its page alone: the sensor's worker consumes,
Materialize drains, Terminate releases.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.local.demo.table import compare
from tests.support.dagster_stage import Stage

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
OUTPUT = ("orders", "events")


# Its file is the last one of the folder, because nothing consumes afterwards
def test_materialize_drains_terminate_releases_and_everything_is_there_once(stage: Stage):
    (continuous,) = stage.runs("STARTED")
    assert stage.reports()[0] >= {"records", "rows", "table_version"}
    owners = {row["leaseOwner"]["S"] for row in stage.leases()}
    assert owners == {f"orders-{continuous.run_id[:8]}"}

    stage.publish(400)
    drain = stage.page.materialize(*stage.location, OUTPUT)
    stage.wait(
        "the drain to end", lambda: stage.page.status(drain) in ("SUCCESS", "FAILURE", "CANCELED")
    )
    assert stage.page.status(drain) == "SUCCESS"
    stage.wait("all records to be in the table", lambda: stage.rows.count() >= len(stage.ids), 15)

    # What the leader has given to the drain on its way out comes back first: nobody else would take
    # it once the sensor is off
    alone = [(f"orders-{continuous.run_id[:8]}", None)] * 3
    stage.wait(
        "the leases to be back",
        lambda: (
            [
                (row.get("leaseOwner", {}).get("S"), row.get("checkpointOwner"))
                for row in stage.leases()
            ]
            == alone
        ),
        60,
    )
    stage.page.stop_sensor(*stage.location, "orders_leader")
    stage.page.terminate(continuous.run_id)
    stage.wait(
        "the run to be canceled", lambda: stage.page.status(continuous.run_id) == "CANCELED", 30
    )
    assert stage.reports()[0] >= {"whole_run", "lag_seconds_max"}, "of the worker's end"
    assert stage.evaluated() == dict.fromkeys(
        ("data_within_retention", "lag_below_threshold", "no_new_dead_letters"), True
    )
    rows = stage.leases()
    assert len(rows) == 3
    assert not [row for row in rows if "leaseOwner" in row or "checkpointOwner" in row]
    assert stage.dynamodb.scan(TableName="orders-WorkerMetricStats")["Items"] == []

    comparison = compare(stage.table, stage.ids)
    assert comparison.exact, comparison
    # Other tests of the stage may have published before.
    published = len(stage.ids)
    assert published >= 900
    assert comparison.committed == published
    runs = (continuous.run_id, drain)
    assert sum(stage.page.sum_of(run, "run_records") for run in runs) == published
