"""A real pipeline in Dagster on the embedded AWS: the sensor leads, a run drains, the checks
look.
"""

import dagster as dg
import pytest

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.local.server import EmbeddedAws
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.pipeline import Fleet, KinesisPipeline

pytestmark = pytest.mark.processes
RECORDS = 3_000


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An instance, the embedded AWS with a published stream, a pipeline without Spark, its
    definitions, and the run that has drained the stream.
    """
    lake = tmp_path_factory.mktemp("lake")
    fast = {
        "lease": {"failover_time_millis": 3_000, "lease_discovery_interval_millis": 200},
        "assignment": {"lease_assignment_interval_millis": 1_000},
        "worker": {"worker_metrics_reporter_freq_in_millis": 500},
    }
    with EmbeddedAws() as aws, dg.DagsterInstance.ephemeral() as instance:
        resource = AwsResource(
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
        pipeline = KinesisPipeline(
            "orders",
            ["orders"],
            DeltaSink(str(lake / "raw")),
            workers=Fleet(1, 2),
            settings_overrides=fast,
        )
        kinesis = resource.clients(pipeline.settings).kinesis
        kinesis.create_stream(StreamName="orders", ShardCount=4)
        for first in range(0, RECORDS, 500):
            kinesis.put_records(
                StreamName="orders",
                Records=[
                    {"Data": f"{n}".encode(), "PartitionKey": f"{n}"}
                    for n in range(first, first + 500)
                ],
            )
        defs = build_definitions(pipeline, DagsterOptions(aws=resource))
        yield instance, pipeline, defs, resource, drained(instance, pipeline, defs)


def drained(instance, pipeline, defs):
    """Materialize the output, which drains what the stream has."""
    return defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance, asset_selection=[Names.of(pipeline).output]
    )


def tick(running, cursor=None):
    instance, pipeline, defs, _, _ = running
    sensor = defs.resolve_sensor_def(Names.of(pipeline).leader_sensor)
    held = defs.get_repository_def().get_top_level_resources()
    with dg.build_sensor_context(
        instance=instance, definitions=defs, sensor_name=sensor.name, cursor=cursor, resources=held
    ) as context:
        return sensor.evaluate_tick(context)


def test_materialize_drains_everything_and_its_figures_agree_with_the_table(running):
    # its runtime must start in the process that uses it
    from deltalake import DeltaTable  # noqa: PLC0415

    instance, pipeline, _, _, result = running
    assert result.success
    table = DeltaTable(pipeline.sink.uri).to_pyarrow_table()
    assert sorted(int(v.as_py()) for v in table["data"]) == list(range(RECORDS))
    events = [
        r.asset_materialization
        for r in instance.get_records_for_run(
            result.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
        ).records
    ]
    assert sum(e.metadata["records"].value for e in events) == RECORDS
    assert sum(e.metadata["rows"].value for e in events) == RECORDS
    assert events[-1].metadata["dagster/row_count"].value == RECORDS
    checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert checks.keys() == {
        "data_within_retention",
        "lag_below_threshold",
        "no_new_dead_letters",
    }
    assert all(check.passed for check in checks.values()), checks


def test_after_the_drain_nothing_is_owned_and_nothing_is_left_to_drain(running):
    instance, pipeline, defs, resource, _ = running
    tables = defs.get_repository_def().get_top_level_resources()
    assert set(tables) >= {Names.of(pipeline).leases_resource, Names.of(pipeline).aws}
    dynamodb = resource.clients(pipeline.settings).dynamodb
    rows = dynamodb.scan(TableName="orders")["Items"]
    assert len(rows) == 4
    assert not [row for row in rows if "leaseOwner" in row]
    assert dynamodb.scan(TableName="orders-WorkerMetricStats")["Items"] == []
    again = drained(instance, pipeline, defs)
    assert again.success
    (event,) = [
        r.event_log_entry.dagster_event.asset_observation_data.asset_observation
        for r in instance.get_records_for_run(
            again.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION
        ).records
    ]
    assert (event.metadata["records"].value, event.metadata["dagster/row_count"].value) == (
        0,
        RECORDS,
    )


def test_the_sensor_leads_and_tells_what_it_sees(running):
    first = tick(running)
    assert len(first.run_requests) == 1
    (fleet,) = [
        e
        for e in first.asset_events
        if isinstance(e, dg.AssetObservation)
        if e.asset_key.path[-1] == "fleet"
    ]
    assert fleet.metadata["leases"].value == 4
    assert fleet.metadata["leader"].value.endswith("/orders_leader")
    second = tick(running, first.cursor)
    assert not [e for e in second.asset_events if isinstance(e, dg.AssetObservation)]


def test_the_check_with_a_button_reads_the_real_table(running):
    instance, _, defs, _, _ = running
    job = dg.define_asset_job(
        "coverage",
        dg.AssetSelection.checks(
            dg.AssetCheckKey(dg.AssetKey(["orders", "fleet"]), "shards_covered")
        ),
    )
    result = (
        dg.Definitions.merge(defs, dg.Definitions(jobs=[job]))
        .resolve_job_def("coverage")
        .execute_in_process(instance=instance)
    )
    (evaluation,) = result.get_asset_check_evaluations()
    assert (evaluation.passed, evaluation.metadata["leases"].value) == (True, 4)


def test_maintenance_compacts_and_keeps_every_record(running):
    # its runtime must start in the process that uses it
    from deltalake import DeltaTable  # noqa: PLC0415

    instance, pipeline, defs, _, _ = running
    before = len(DeltaTable(pipeline.sink.uri).file_uris())

    def operate(operation, **options):
        config = {"config": {"operation": {operation: options}}}
        return defs.resolve_job_def("orders_operate").execute_in_process(
            instance=instance,
            run_config={"ops": {"orders_operation": config}},
            raise_on_error=False,
        )

    preview = operate("compact", dry_run=True)
    assert preview.success
    assert len(DeltaTable(pipeline.sink.uri).file_uris()) == before
    (event,) = preview.get_asset_observation_events()
    shown = event.asset_observation_data.asset_observation.metadata
    assert "dry run: would merge up to" in shown["outcome"].value
    assert operate("compact").success
    assert operate("vacuum").success
    table = DeltaTable(pipeline.sink.uri)
    assert len(table.file_uris()) <= before
    assert table.to_pyarrow_table().num_rows == RECORDS
    assert not operate("vacuum", retention_hours=0).success
