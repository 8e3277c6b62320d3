"""What a pipeline becomes in Dagster, and that it works with others in one repository."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.local.dagster_yaml import write_dagster_yaml
from kcl_pipeline.orchestration import checks as checks_module
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import Names, python_name, worker_id_of
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.resources import (
    AwsResource,
    CoordinatorStateTableResource,
    LeaseTableResource,
    WorkerMetricsTableResource,
)
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.streams import stream_name
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from tests.support.dagster_fakes import (
    FakeLeaseTable,
    FakePipeline,
    FakeSink,
    FakeWorkerTable,
    leases,
    resources,
)

ARN = "arn:aws:kinesis:eu-central-1:123456789012:stream/clicks"

NOTHING_SEEN = {
    "workers": (),
    "waits": {},
    "unchanged": {},
    "runs": (),
    "wall_seconds": 0.0,
    "threshold_seconds": 60.0,
    "lock_owner": None,
}


def parents(defs: dg.Definitions, key: dg.AssetKey) -> set[str]:
    return {k.to_user_string() for k in defs.resolve_asset_graph().get(key).parent_keys}


def test_lineage_from_stream_to_output_with_the_fleet_beside_it():
    pipeline = FakePipeline(streams=("orders", ARN))
    defs = build_definitions(pipeline)
    names = Names.of(pipeline)
    dg.Definitions.validate_loadable(defs)
    assert parents(defs, names.output) == {"kinesis/orders", "kinesis/clicks"}
    assert parents(defs, names.fleet) == set()
    graph = defs.resolve_asset_graph()
    assert {k.to_user_string() for k in graph.materializable_asset_keys} == {"orders-eu/per_minute"}
    assert {k.to_user_string() for k in graph.external_asset_keys} == {
        "kinesis/orders",
        "kinesis/clicks",
        "orders-eu/fleet",
    }


def test_what_is_shown_about_the_output():
    pipeline = FakePipeline(transform=lambda records: records)
    options = DagsterOptions(
        owners=("team:streaming",), tags={"domain": "orders"}, group_name="shop"
    )
    defs = build_definitions(pipeline, options)
    spec = defs.resolve_asset_graph().get(Names.of(pipeline).output)
    assert (spec.group_name, list(spec.owners), spec.tags["domain"]) == (
        "shop",
        ["team:streaming"],
        "orders",
    )
    assert spec.metadata["dagster/uri"] == "/nowhere/lake/per_minute/"
    assert spec.kinds == {"kinesis", "spark", "deltalake"}
    # It would count materializations: it would pass while a shard waits, and fail in a quiet night.
    assert spec.freshness_policy is None


def test_the_consume_job_has_no_checks_and_runs_in_its_own_process():
    defs = build_definitions(FakePipeline())
    job = defs.resolve_job_def("orders_eu_consume")
    assert job.executor_def.name == "in_process"
    assert {n.name for n in job.nodes} == {"orders_eu_worker"}
    assert job.tags["kcl/mode"] == "continuous"
    assert job.tags["dagster/max_retries"] == "0"


def test_pipelines_with_a_common_stream_merge_with_each_other_and_with_other_definitions():
    @dg.asset(deps=[dg.AssetKey(["orders-eu", "per_minute"])])
    def report() -> None: ...

    mine = dg.Definitions(assets=[report], resources={"aws": 1}, executor=dg.in_process_executor)
    second = FakePipeline(name="fraud", sink=FakeSink("/lake/fraud"))
    merged = dg.Definitions.merge(
        build_definitions(FakePipeline()), build_definitions(second), mine
    )
    dg.Definitions.validate_loadable(merged)
    assert parents(merged, dg.AssetKey("report")) == {"orders-eu/per_minute"}
    assert {s.name for s in merged.sensors} == {"orders_eu_leader", "fraud_leader"}


def test_the_checks_with_a_button_have_the_names_that_the_leader_reports(monkeypatch):
    model = KinesisModel(VirtualClock())
    model.create_stream("orders", 2)
    monkeypatch.setattr(checks_module, "open_kinesis", lambda *_: InMemoryKinesis(model))
    overrides = {
        "lease": {"failover_time_millis": 1_000},
        "worker": {"worker_metrics_reporter_freq_in_millis": 200},
    }
    pipeline = FakePipeline(overrides=overrides)
    rows = leases(2, ["w-1"])
    coordinator = InMemoryCoordinatorStateTable()

    class Renewing(FakeLeaseTable):
        def list_leases(self):
            self.leases = [le.with_(counter=le.counter + 1) for le in self.leases]
            return super().list_leases()

    class Reporting(FakeWorkerTable):
        def scan_workers(self):
            self.beat("w-1")
            return super().scan_workers()

    defs = build_definitions(
        pipeline, DagsterOptions(check_limits=CheckLimits(leader_absent_seconds=0.5))
    )
    bound = dg.Definitions(
        assets=defs.assets,
        asset_checks=defs.asset_checks,
        jobs=defs.jobs,
        resources=resources(pipeline, Renewing(rows), Reporting(), coordinator=coordinator),
    )
    job = dg.define_asset_job("checks", dg.AssetSelection.all_asset_checks())
    with dg.DagsterInstance.ephemeral() as instance:
        checks = (
            dg.Definitions.merge(bound, dg.Definitions(jobs=[job]))
            .resolve_job_def("checks")
            .execute_in_process(instance=instance)
        )
    found = {
        (e.asset_key.to_user_string(), e.check_name): e.passed
        for e in checks.get_asset_check_evaluations()
    }
    assert found == {
        ("orders-eu/fleet", "shards_covered"): True,
        ("orders-eu/fleet", "shards_moving"): True,
        ("orders-eu/fleet", "no_records_lost"): True,
        ("orders-eu/fleet", "workers_running"): True,
        ("orders-eu/fleet", "leader_present"): False,
        ("orders-eu/per_minute", "lag_below_threshold"): False,
        ("orders-eu/per_minute", "data_within_retention"): False,  # nothing is known
        ("orders-eu/per_minute", "no_new_dead_letters"): False,  # the output was never reported
    }


@pytest.mark.parametrize(
    ("text", "expected"), [("orders", "orders"), ("a.b-c", "a_b_c"), ("9lives", "_9lives")]
)
def test_names_that_dagster_takes(text, expected):
    assert python_name(text) == expected
    pipeline = FakePipeline(name=f"{text}xx")
    dg.Definitions.validate_loadable(build_definitions(pipeline))


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("/lake/my orders", "my_orders"),
        ("/lake/date=2026-01-02", "date_2026-01-02"),
        ("s3://lake/a:b/", "a_b"),
        ("/lake/übung", "_bung"),
        ("/lake/orders.v2", "orders.v2"),
        ("/", "output"),
    ],
)
def test_any_folder_gives_an_asset_key_that_dagster_accepts(uri, name):
    pipeline = FakePipeline(sink=FakeSink(uri))
    defs = build_definitions(pipeline)
    dg.Definitions.validate_loadable(defs)
    assert Names.of(pipeline).output == dg.AssetKey(["orders-eu", name])
    (key,) = defs.resolve_asset_graph().materializable_asset_keys
    assert key == Names.of(pipeline).output
    assert defs.resolve_asset_graph().get(key).metadata["dagster/uri"] == uri


@pytest.mark.parametrize(
    "given", ["lake/orders_v2", ["lake", "orders_v2"], dg.AssetKey(["lake", "orders_v2"])]
)
def test_the_asset_key_of_the_output_can_be_set(given):
    defs = build_definitions(FakePipeline(output_asset_key=given))
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    assert set(graph.materializable_asset_keys) == {dg.AssetKey(["lake", "orders_v2"])}
    checked = {key.asset_key for key in graph.asset_check_keys}
    assert dg.AssetKey(["lake", "orders_v2"]) in checked


@pytest.mark.parametrize("given", ["", [], 7, ["lake", "my orders"], "lake//orders", ["a", 1]])
def test_a_wrong_asset_key_is_refused(given):
    with pytest.raises(SettingsError, match=r"output_asset_key.*Write"):
        build_definitions(FakePipeline(output_asset_key=given))


def test_names_of_streams_and_workers():
    assert (stream_name("orders"), stream_name(ARN)) == ("orders", "clicks")
    assert worker_id_of("orders-eu-1", "0123456789", "-") == "orders_eu_1-01234567"
    assert worker_id_of("a::b", "0123456789", "::") == "a_b::01234567"
    assert Names.of(FakePipeline(sink=object())).output == dg.AssetKey(["orders-eu", "output"])


def test_clients_are_kept_by_the_process_one_set_per_configuration():
    settings = ConsumerSettings(application_name="orders", streams=("orders",))
    here = AwsResource(region_name="eu-central-1", endpoint_url="http://127.0.0.1:1")
    clients = here.clients(settings)
    assert (
        AwsResource(region_name="eu-central-1", endpoint_url="http://127.0.0.1:1").clients(settings)
        is clients
    )
    assert (
        AwsResource(region_name="us-east-1", endpoint_url="http://127.0.0.1:1").clients(settings)
        is not clients
    )
    assert here.clients(settings.model_copy(update={"application_name": "other"})) is not clients
    assert (clients.region_name, clients.endpoint_url) == ("eu-central-1", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (LeaseTableResource, "orders-leases"),
        (WorkerMetricsTableResource, "orders-WorkerMetricStats"),
        (CoordinatorStateTableResource, "orders-CoordinatorState"),
    ],
)
def test_table_resources_know_the_tables_of_their_application(kind, name):
    settings = ConsumerSettings(
        application_name="orders",
        streams=("orders",),
        lease_table={"table_name": "orders-leases"},
        lease={"failover_time_millis": 3_000},
    )
    resource = kind.of(
        settings,
        AwsResource(region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"),
    )
    assert resource.settings() == settings
    assert resource.table().name == name
    by_hand = kind(aws=AwsResource(region_name="us-east-1"), application_name="orders")
    default = {"orders-leases": "orders"}.get(name, name)
    assert by_hand.table().name == default
    renamed = kind(
        aws=AwsResource(region_name="us-east-1"),
        application_name="orders",
        lease_table_name="orders-leases",
    )
    assert renamed.table().name == name
    seen = []

    @dg.op
    def look(table: kind) -> None:
        seen.append(table.table().name)

    @dg.job(resource_defs={"table": resource}, executor_def=dg.in_process_executor)
    def look_job() -> None:
        look()

    with dg.DagsterInstance.ephemeral() as instance:
        assert look_job.execute_in_process(instance=instance).success
    assert seen == [name]


def test_the_instance_settings_load(tmp_path):
    path = write_dagster_yaml(tmp_path / "home")
    with dg.DagsterInstance.from_config(str(path.parent)) as instance:
        assert instance.get_settings("sensors")["use_threads"] is True
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 25
    path.write_text("telemetry:\n  enabled: true\n")
    assert write_dagster_yaml(tmp_path / "home").read_text() == "telemetry:\n  enabled: true\n"


def test_a_sink_that_is_no_table_has_no_address():
    defs = build_definitions(FakePipeline(sink=SimpleNamespace()))
    assert (
        "dagster/uri"
        not in defs.resolve_asset_graph().get(dg.AssetKey(["orders-eu", "output"])).metadata
    )


@pytest.mark.long  # `tests/project` loads the definitions in the process of the test
def test_the_workspace_of_the_repository_validates(tmp_path):
    root = Path(__file__).parents[2]
    command = [
        str(Path(sys.executable).with_name("dagster")),
        "definitions",
        "validate",
        "-w",
        str(root / "workspace.yaml"),
    ]
    env = {
        **os.environ,
        "DAGSTER_HOME": str(write_dagster_yaml(tmp_path / "home").parent),
        "LAKE": str(tmp_path / "lake"),
    }
    answer = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "lake").exists()
