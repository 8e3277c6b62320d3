"""The alert hook of the page of checks and events, evaluated against real evaluations."""

from __future__ import annotations

import time

import dagster as dg
import pytest

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
                check_name="leases_renewed",
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
        assert tick() == ["orders/fleet:leases_renewed: WARN. 2 leases wait"]
        assert tick() == []
        report(passed=False)
        assert tick() == ["orders/fleet:leases_renewed: ERROR. 2 leases wait"]
        report(passed=True)
        assert tick() == ["orders/fleet:leases_renewed: passed. 2 leases wait"]
        now = time.time()
        names["time"] = type("Later", (), {"time": staticmethod(lambda: now + 700)})
        assert tick() == ["orders/fleet:leases_renewed: too old. Is the leader sensor on?"]


def test_a_downstream_asset_beside_a_worker_waits_while_a_check_fails(tmp_path, monkeypatch):
    (example,) = (one.code for one in snippets("README.md") if one.file == "my_orders.py")
    (code,) = (one.code for one in snippets(PAGE) if one.file == "my_report.py")
    (tmp_path / "my_orders.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    names: dict[str, object] = {"__name__": "my_report"}
    exec(compile(code, "my_report.py", "exec"), names)
    output, orders = names["output"], names["orders"]
    defs = dg.Definitions.merge(orders.definitions(), names["defs"])
    cursor = None

    def requested() -> bool:
        nonlocal cursor
        selection = dg.AssetSelection.assets("orders_report")
        result = dg.evaluate_automation_conditions(
            defs=defs, instance=instance, asset_selection=selection, cursor=cursor
        )
        cursor = result.cursor
        return bool(result.get_num_requested(dg.AssetKey("orders_report")))

    def report(*, passed: bool) -> None:
        """As the sensor does: the report of the output, then its check."""
        instance.report_runless_asset_event(dg.AssetMaterialization(output))
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=output, check_name="lag_below_threshold", passed=passed
            )
        )

    with dg.DagsterInstance.ephemeral() as instance:
        worker = defs.resolve_job_def("orders_consume")
        instance.create_run_for_job(worker, status=dg.DagsterRunStatus.STARTED, tags=worker.tags)
        requested()
        report(passed=True)
        assert requested()
        instance.report_runless_asset_event(dg.AssetMaterialization("orders_report"))
        report(passed=False)
        assert not requested()
        report(passed=True)
        assert requested()
