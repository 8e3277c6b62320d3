"""The check of hung workers."""

from dataclasses import replace

import dagster as dg

from kcl_pipeline.leases.state.worker_status import HungState, WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.checks.hangs import ADVICE, hung


def test_a_hung_worker_fails_with_its_step_and_what_to_do():
    working = WorkerMetrics("w-1", 7, status=WorkerStatus())
    old = WorkerMetrics("w-2", 7)
    assert hung([working, old]).passed
    assert hung([]).passed
    blocked = replace(
        working, worker_id="w-3", run_id="r", status=WorkerStatus(hung=HungState("writing", 900, 4))
    )
    verdict = hung([blocked, working, old])
    assert not verdict.passed
    assert verdict.severity is dg.AssetCheckSeverity.ERROR
    assert verdict.description == (
        "1 worker is hung. The first, w-3, has been in step writing for 900 s while records of "
        f"4 leases wait. {ADVICE}"
    )
    assert [one.data for one in verdict.metadata["workers"].records] == [
        {"worker": "w-3", "step": "writing", "seconds": 900, "leases": 4, "run": "r"}
    ]
