"""The alert hook of the page of checks and events, evaluated against real evaluations."""

from __future__ import annotations

import importlib
import time
from typing import Any

import dagster as dg
import pytest

from kcl_pipeline.orchestration.reports import QUIET_SECONDS
from tests.guides.snippets import snippets

PAGE = "docs/checks-and-events.md"


@pytest.fixture
def alerts(tmp_path, monkeypatch):
    """The module that the page says to save, and the messages that it has sent."""
    (example,) = (one.code for one in snippets("README.md") if one.file == "my_orders.py")
    (code,) = (one.code for one in snippets(PAGE) if one.file == "my_alerts.py")
    (tmp_path / "my_orders.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    names: dict[str, object] = {"__name__": "my_alerts"}
    exec(compile(code, "my_alerts.py", "exec"), names)
    sent: list[str] = []
    names["send"] = sent.append
    return names, sent


def test_a_message_is_sent_when_a_check_changes(alerts):
    names, sent = alerts
    dg.Definitions.validate_loadable(names["defs"])
    cursor, key = None, dg.AssetKey(["orders", "fleet"])

    def tick() -> list[str]:
        nonlocal cursor
        sent.clear()
        with dg.build_sensor_context(instance=instance, cursor=cursor) as context:
            names["orders_alerts"](context)
            cursor = context.cursor
        return list(sent)

    def report(*, passed: bool, severity: str = "ERROR") -> None:
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=key,
                check_name="shards_moving",
                passed=passed,
                severity=dg.AssetCheckSeverity(severity),
                description="2 leases wait",
            )
        )

    with dg.DagsterInstance.ephemeral() as instance:
        assert tick() == []
        report(passed=True)
        assert tick() == []
        report(passed=False, severity="WARN")
        assert tick() == ["orders/fleet:shards_moving: WARN. 2 leases wait"]
        assert tick() == []
        report(passed=False)
        assert tick() == ["orders/fleet:shards_moving: ERROR. 2 leases wait"]
        report(passed=True)
        assert tick() == ["orders/fleet:shards_moving: passed. 2 leases wait"]
        now = time.time()

        def after(seconds: float) -> list[str]:
            names["time"] = type("Later", (), {"time": staticmethod(lambda: now + seconds)})
            return tick()

        assert after(QUIET_SECONDS + 600) == [], "a check that passes is reported once an hour"
        assert after(3 * QUIET_SECONDS) == [
            "orders/fleet:shards_moving: too old. Is the leader sensor on?"
        ]


class Automation:
    """The definitions of the page beside a running worker, evaluated as the daemon does."""

    def __init__(self, instance: dg.DagsterInstance, defs: dg.Definitions, name: str) -> None:
        self.instance, self.defs, self.name = instance, defs, name
        self.cursor: Any = None
        worker = defs.resolve_job_def("orders_consume")
        instance.create_run_for_job(worker, status=dg.DagsterRunStatus.STARTED, tags=worker.tags)
        self.fires()

    def fires(self) -> bool:
        """Whether the asset is requested now. If so, it is materialized."""
        result = dg.evaluate_automation_conditions(
            defs=self.defs,
            instance=self.instance,
            asset_selection=dg.AssetSelection.assets(self.name),
            cursor=self.cursor,
        )
        self.cursor = result.cursor
        if not result.get_num_requested(dg.AssetKey(self.name)):
            return False
        self.instance.report_runless_asset_event(dg.AssetMaterialization(self.name))
        return True

    def check(self, key: dg.AssetKey, name: str, *, passed: bool) -> None:
        """Report a check, as the sensor does."""
        self.instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(asset_key=key, check_name=name, passed=passed)
        )


@pytest.fixture
def orders(tmp_path, monkeypatch):
    """The pipeline of the README, as the module `my_orders`."""
    (example,) = (one.code for one in snippets("README.md") if one.file == "my_orders.py")
    (tmp_path / "my_orders.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return importlib.import_module("my_orders").orders


def test_a_downstream_asset_beside_a_worker_waits_while_a_check_fails(orders):
    (code,) = (one.code for one in snippets(PAGE) if one.file == "my_report.py")
    names: dict[str, Any] = {"__name__": "my_report"}
    exec(compile(code, "my_report.py", "exec"), names)
    defs = dg.Definitions.merge(orders.definitions(), names["defs"])
    output = names["output"]
    with dg.DagsterInstance.ephemeral() as instance:
        automation = Automation(instance, defs, "orders_report")
        for passed in (True, False, True):
            # As the sensor does: the report of the output, then its check
            instance.report_runless_asset_event(dg.AssetMaterialization(output))
            automation.check(output, "lag_below_threshold", passed=passed)
            assert automation.fires() is passed


def test_an_asset_runs_beside_a_worker_when_a_check_of_the_fleet_fails(orders):
    (code,) = (one.code for one in snippets(PAGE) if "check_fails" in one.code)
    names: dict[str, Any] = {"__name__": "my_fleet_report"}
    exec(compile(code, "my_fleet_report.py", "exec"), names)
    defs = dg.Definitions.merge(
        orders.definitions(), dg.Definitions(assets=[names["fleet_report"]])
    )
    fleet = dg.AssetKey(["orders", "fleet"])
    with dg.DagsterInstance.ephemeral() as instance:
        automation = Automation(instance, defs, "fleet_report")
        for passed, fires in ((True, False), (False, True), (False, False), (True, False)):
            automation.check(fleet, "shards_moving", passed=passed)
            assert automation.fires() is fires
