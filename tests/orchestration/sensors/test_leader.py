"""The leader sensor: ticks, what they ask for, what they tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import dagster as dg

from kcl_pipeline.events import LeaderElected, LossReason, PlanMade, RecordsLost, TableRestored
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leases.application import Loss
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.row import BadRow
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.leader import owner_name
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, WorkerState
from kcl_pipeline.position import Position
from kcl_pipeline.worker_status import PausedLease, UnavailableStream, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import (
    FakeCycle,
    FakePipeline,
    leases,
    led,
    resources,
    worker,
)
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)


def kinds(result: dg.SensorResult) -> Counter[str]:
    return Counter(
        e.check_name if isinstance(e, dg.AssetCheckEvaluation) else "/".join(e.asset_key.path)
        for e in result.asset_events
    )


def test_one_cycle_per_tick_under_one_name_that_is_kept(instance):
    stage = Stage(instance)
    for _ in range(3):
        stage()
    (built,) = stage.pipeline.built_leaders
    assert built["resume_own_name"] is True
    assert built["owner_name"].startswith("dagster/")
    assert built["owner_name"].endswith("/orders_eu_leader")
    again = Stage(instance)
    again()
    assert again.pipeline.built_leaders[0]["owner_name"] == built["owner_name"]
    assert (stage.pipeline.cycle.calls, stage.pipeline.cycle.deadlines[0]) == (3, 20.0)


def test_other_instances_lead_under_another_name(instance):
    stage = Stage(instance)
    stage()
    with dg.DagsterInstance.ephemeral() as another:
        other = Stage(another)
        other()
    assert (
        other.pipeline.built_leaders[0]["owner_name"]
        != stage.pipeline.built_leaders[0]["owner_name"]
    )


def test_deployments_of_dagster_plus_lead_under_different_names(monkeypatch):
    def name(deployment: str | None) -> str:
        monkeypatch.delenv("DAGSTER_CLOUD_DEPLOYMENT_NAME", raising=False)
        if deployment is not None:
            monkeypatch.setenv("DAGSTER_CLOUD_DEPLOYMENT_NAME", deployment)
        location = SimpleNamespace(location_name="orders")
        without_id = SimpleNamespace(run_storage=object())
        context = SimpleNamespace(instance=without_id, code_location_origin=location)
        return owner_name(context, SimpleNamespace(leader_sensor="orders_eu_leader"))

    assert name("prod") == "dagster/prod/orders/orders_eu_leader"
    assert name("staging") == "dagster/staging/orders/orders_eu_leader"
    assert name(None) == "dagster/instance/orders/orders_eu_leader"


def test_tells_streams_tables_and_checks(instance):
    pipeline = FakePipeline()
    rows = leases(4, ["w-1", "w-2"])
    plan = Plan(
        "balanced",
        (Move(rows[0].lease_key, "w-1", "w-2", "w-1 has too much"),),
        notes=("one move",),
    )
    given = PlanInput(
        tuple(LeaseState(row.lease_key, row.owner) for row in rows),
        (WorkerState("w-1", "w"), WorkerState("w-2", "w")),
    )
    workers = [worker("w-1", 30.0), worker("w-2", 40.0)]
    pipeline.cycle = FakeCycle([led(rows, workers, plan=plan, plan_input=given)])
    result = Stage(instance, pipeline)()
    assert kinds(result) == {
        "orders-eu/fleet": 1,
        "kinesis/orders": 1,
        "shards_moving": 1,
        "shards_covered": 1,
        "no_records_lost": 1,
        "workers_running": 1,
        "leader_present": 1,
    }
    fleet = next(e for e in result.asset_events if e.asset_key.path[-1] == "fleet")
    assert isinstance(fleet, dg.AssetObservation)
    assert fleet.metadata["leases"].value == 4
    assert len(fleet.metadata["lease_rows"].records) == 4
    assert fleet.metadata["lease_spread"].value == 0
    assert fleet.metadata["plan"].records[0].data["reason"] == "w-1 has too much"
    assert fleet.metadata["cpu_spread"].value == 10.0
    assert all(e.passed for e in result.asset_events if isinstance(e, dg.AssetCheckEvaluation))


def test_lag_and_paused_shards_are_those_of_the_workers_rows(instance):
    pause = PausedLease("shardId-3", "16 of 16 records fail", 40.0)
    rows = [
        replace(worker("w-1"), last_update_seconds=40, status=WorkerStatus(250)),
        replace(
            worker("w-2"),
            last_update_seconds=30,
            status=WorkerStatus(
                90_000, 1, (pause,), 1, failed_batches=3, totals=WorkerTotals(dead_letters=12)
            ),
        ),
    ]
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(4, ["w-1", "w-2"]), rows)]))
    result = Stage(instance, pipeline)()
    checks = {
        event.check_name: event
        for event in result.asset_events
        if isinstance(event, dg.AssetCheckEvaluation)
    }
    assert not checks["shards_moving"].passed
    assert "shardId-3 of worker w-2 for 40 s, 16 of 16" in checks["shards_moving"].description
    assert not checks["lag_below_threshold"].passed
    assert checks["lag_below_threshold"].metadata["lag_seconds"].value == 90.0
    assert "not read yet: 1 shard" in checks["lag_below_threshold"].description
    assert ", reported 9999" in checks["lag_below_threshold"].description
    fleet = next(e for e in result.asset_events if e.asset_key.path[-1] == "fleet")
    assert [row.data["lag"] for row in fleet.metadata["worker_rows"].records] == [
        "0.2 s",
        "90.0 s (1 shard unknown)",
    ]
    second = fleet.metadata["worker_rows"].records[1].data
    assert "1 shard paused, the last 3 batches refused" in second["state"]
    assert second["dead letters"] == 12


def test_of_many_leases_the_first_200_are_shown_and_the_rest_is_counted(instance):
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(230, ["w"]), [worker("w")])]))
    result = Stage(instance, pipeline)()
    metadata = next(e for e in result.asset_events if e.asset_key.path[-1] == "fleet").metadata
    assert len(metadata["lease_rows"].records) == 200
    assert metadata["lease_rows_not_shown"].value.startswith("30 leases with a smaller lag")


def test_tells_only_what_changed_and_everything_once_an_hour(instance):
    pipeline = FakePipeline()
    rows = leases(4, ["w-1", "w-2"])
    workers = [worker("w-1"), worker("w-2")]
    moved = [rows[0].with_(owner="w-2"), *rows[1:]]
    pipeline.cycle = FakeCycle([led(rows, workers), led(rows, workers), led(moved, workers)])
    stage = Stage(instance, pipeline)
    first = stage().asset_events
    assert len(first) == 7
    assert not stage().asset_events
    assert kinds(stage()) == {"orders-eu/fleet": 1, "kinesis/orders": 1}
    quiet = Counter()
    for _ in range(20):
        quiet += kinds(stage(200.0))
    assert quiet.pop("orders-eu/per_minute") == 20
    assert set(quiet.values()) <= {1, 2}, "once an hour"
    assert {"shards_covered", "leader_present"} <= set(quiet)


def test_hash_keys_that_stay_uncovered_fail_the_check_after_a_grace(instance):
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(3, ["w-1"])[:2], [worker("w-1")])]))
    stage = Stage(instance, pipeline)
    verdicts = [
        [
            e.passed
            for e in stage().asset_events
            if isinstance(e, dg.AssetCheckEvaluation) and e.check_name == "shards_covered"
        ]
        for _ in range(8)
    ]
    assert verdicts[:6] == [[]] * 6
    assert verdicts[6] == [False]


def test_a_missing_stream_of_several_fails_the_check_with_its_name_and_its_reason(instance):
    rows = leases(2, ["w-1"], "1:orders:1") + leases(2, ["w-1"], "1:clicks:1")
    gone = UnavailableStream("clicks", "the stream clicks does not exist")
    pipeline = FakePipeline(
        streams=("orders", "clicks"),
        cycle=FakeCycle(
            [
                led(rows, [worker("w-1")], unavailable=(gone,)),
                led(rows, [worker("w-1")]),
                CycleReport(led=False, lock_owner="orders-1"),
            ]
        ),
    )
    stage = Stage(instance, pipeline)

    def checks():
        events = stage(10).asset_events
        return {e.check_name: e for e in events if isinstance(e, dg.AssetCheckEvaluation)}

    found = checks()
    assert not found["shards_covered"].passed
    assert "clicks: the stream clicks does not exist" in found["shards_covered"].description
    assert "Create the stream" in found["shards_covered"].description
    assert checks()["shards_covered"].passed
    stage.leases.leases = rows
    assert all("shards_covered" not in checks() for _ in range(8)), "another process leads"
    # The worker that leads has the result of its cycles in its row.
    stage.workers.rows = {
        "orders-1": replace(worker("orders-1"), status=WorkerStatus(unavailable=(gone,))),
        "orders-2": replace(worker("orders-2"), status=WorkerStatus(unavailable=())),
    }
    assert "clicks: the stream clicks does not exist" in checks()["shards_covered"].description
    leading = replace(worker("orders-1"), status=WorkerStatus(unavailable=()))
    stage.workers.rows = {"orders-1": leading}
    assert checks()["shards_covered"].passed


def test_lost_records_fail_the_check_until_they_are_acknowledged(instance):
    rows = leases(2, ["w-1"])
    stage = Stage(instance, FakePipeline(cycle=FakeCycle([led(rows, [worker("w-1")])])))
    ensure_client_version(stage.coordinator, "w-1", stage.clock)

    def check():
        events = stage(10).asset_events
        return {e.check_name: e for e in events if isinstance(e, dg.AssetCheckEvaluation)}.get(
            "no_records_lost"
        )

    assert check().passed
    event = RecordsLost("w-1", "s-1", LossReason.ROW_DELETED, Position("7"), stream="orders")
    lost = Loss.of(event, 1_000)
    shown = stage.coordinator.change_losses(lambda losses: losses.with_losses([lost]))
    failed = check()
    assert not failed.passed
    assert failed.severity == dg.AssetCheckSeverity.ERROR
    assert "1 loss of records, 0 acknowledged; the last: orders s-1 (row_" in failed.description
    assert "kcl-pipeline do acknowledge" in failed.description
    assert failed.metadata["losses"].value == 1
    stage.coordinator.change_losses(lambda losses: losses.with_acknowledged(shown, 2_000))
    assert check().passed
    restore = Loss.of(TableRestored(58, "version 12", "t-1"), 1_000)
    shown = stage.coordinator.change_losses(lambda losses: losses.with_losses([restore]))
    restored = check()
    assert not restored.passed
    for part in ("58", "version 12", "are not read again", "kcl-pipeline do seek"):
        assert part in restored.description
    stage.coordinator.change_losses(lambda losses: losses.with_acknowledged(shown, 2_000))
    passed = check()
    assert passed.passed
    assert passed.description.startswith(
        "2 losses of records, 2 acknowledged at 1970-01-01T00:00:02+00:00; the last: RESTORE"
    )
    item = stage.coordinator.rows()["Migration3.0"]
    stage.coordinator.plant(item | {"kclpLosses": {"S": "[]"}})
    unreadable = check()
    assert not unreadable.passed
    assert "kclpLosses" in unreadable.description


def test_a_lease_whose_owner_is_gone_for_long_fails_the_check(instance):
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(2, ["w-1", "gone"]), [worker("w-1")])]))
    stage = Stage(instance, pipeline)
    verdicts = [
        e.passed
        for _ in range(30)
        for e in stage().asset_events
        if isinstance(e, dg.AssetCheckEvaluation) and e.check_name == "shards_moving"
    ]
    assert verdicts[0] is True
    assert verdicts[-1] is False


def test_when_another_process_leads_the_tables_are_told_all_the_same(instance):
    stage = Stage(
        instance, FakePipeline(cycle=FakeCycle([CycleReport(led=False, lock_owner="orders-1")]))
    )
    stage.leases.leases = leases(2, ["w-1"])
    stage.workers.beat("w-1")
    result = stage()
    fleet = next(e for e in result.asset_events if e.asset_key.path[-1] == "fleet")
    assert fleet.metadata["leases"].value == 2
    assert fleet.metadata["leader"].value == "orders-1"
    assert len(result.run_requests) == 1, "the row of w-1 counts as a worker"


def test_the_log_has_what_happened_and_nothing_otherwise(instance, monkeypatch):
    stage = Stage(instance)
    stage.run()
    stage.run()
    lines = []
    monkeypatch.setattr(
        dg.SensorEvaluationContext,
        "log",
        property(lambda self: type("Log", (), {"info": staticmethod(lines.append)})),
    )
    stage()
    assert lines == []
    events = stage.pipeline.built_leaders[0]["events"]
    events(PlanMade("balanced", 0, 0, 0, 1.0))
    stage()
    assert lines == []
    events(LeaderElected("dagster/x"))
    stage()
    assert len(lines) == 1
    assert "leader_elected owner_name=dagster/x" in lines[0]


def test_the_sensor_as_dagster_evaluates_it(instance):
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(2, ["w"]), [worker("w")])]))
    defs = build_definitions(pipeline)
    sensor = defs.resolve_sensor_def("orders_eu_leader")
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    assert sensor.minimum_interval_seconds == 4
    with dg.build_sensor_context(
        instance=instance, resources=resources(pipeline), definitions=defs, sensor_name=sensor.name
    ) as context:
        data = sensor.evaluate_tick(context)
    assert len(data.run_requests) == 2
    assert len(data.asset_events) == 7
    assert data.run_requests[0].run_config == {}
    assert (
        build_definitions(pipeline, DagsterOptions(leader_default_running=True))
        .resolve_sensor_def(sensor.name)
        .default_status
        is dg.DefaultSensorStatus.RUNNING
    )


def test_a_worker_row_that_cannot_be_read_is_logged_once_and_fails_the_check(instance):
    stage = Stage(instance)
    stage.workers.bad_rows = [BadRow("workers", "w-1", "sts is 'x'", "1")]
    ticks = [(stage(), list(stage.tick._state.rejected._reported)) for _ in range(3)]
    assert [reported for _, reported in ticks] == [[("workers", "w-1")]] * 3
    verdicts = [
        e
        for result, _ in ticks
        for e in result.asset_events
        if isinstance(e, dg.AssetCheckEvaluation) and e.check_name == "shards_covered"
    ]
    assert verdicts
    assert not verdicts[0].passed
