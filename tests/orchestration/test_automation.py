"""Downstream assets with `AutomationCondition.eager()` beside a running worker."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import FakePipeline, resources

OUTPUT = Names.of(FakePipeline()).output


@dg.asset(deps=[OUTPUT], automation_condition=dg.AutomationCondition.eager())
def revenue() -> None:
    """Somebody's table that follows the output."""


class Automation:
    """Evaluates the automation of the code location, as Dagster's daemon does."""

    def __init__(self, instance: dg.DagsterInstance, defs: dg.Definitions) -> None:
        self.instance, self.defs = instance, defs
        self.cursor: Any = None

    def fires(self) -> bool:
        """Whether `revenue` is requested now. If so, it is materialized."""
        result = dg.evaluate_automation_conditions(
            defs=self.defs,
            instance=self.instance,
            asset_selection=dg.AssetSelection.assets("revenue"),
            cursor=self.cursor,
        )
        self.cursor = result.cursor
        if not result.get_num_requested(dg.AssetKey("revenue")):
            return False
        self.instance.report_runless_asset_event(dg.AssetMaterialization("revenue"))
        return True

    def report(self) -> None:
        """Report the output, as the leader sensor does."""
        self.instance.report_runless_asset_event(dg.AssetMaterialization(OUTPUT))


@pytest.fixture
def instance(dagster_instance):
    dagster_instance.wipe()
    return dagster_instance


def test_a_downstream_eager_asset_fires_while_a_worker_runs_and_when_it_ends(instance):
    fired: list[bool] = []

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        (run,) = instance.get_runs(dg.RunsFilter(job_name="orders_eu_consume"))
        assert run.status is dg.DagsterRunStatus.STARTED
        for _ in range(2):
            fired.append(automation.fires())
            automation.report()
            fired.append(automation.fires())
        fired.append(automation.fires())
        return WorkerSummary(
            worker_id, StopReason.DRAIN_REQUESTED, WorkerStatus(totals=WorkerTotals(9.0, batches=1))
        )

    pipeline = FakePipeline(script=script)
    defs = build_definitions(pipeline)
    defs = dg.Definitions(
        assets=[*(defs.assets or ()), revenue],
        asset_checks=defs.asset_checks,
        jobs=defs.jobs,
        resources=resources(pipeline),
    )
    automation = Automation(instance, defs)
    automation.fires()
    assert defs.resolve_job_def("orders_eu_consume").execute_in_process(instance=instance).success
    assert fired == [False, True, False, True, False]
    assert automation.fires(), "the worker's own materialization at its end"
    assert not automation.fires()
