"""Components as Dagster's loader loads them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import dagster as dg
import pytest

from kcl_pipeline import (
    CheckLimits,
    DagsterOptions,
    DeltaSink,
    Fleet,
    ForeachArrowSink,
    ForeachBatchSink,
    KinesisPipeline,
    KinesisPipelineComponent,
    SettingsError,
    StreamConfig,
    StreamSelector,
)
from tests.orchestration.component.project import project  # noqa: F401 (fixture)

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")

SMALL = """\
type: kcl_pipeline.KinesisPipelineComponent
attributes:
  name: {name}
  streams: [orders]
  sink: {{delta: {{uri: lake/{name}}}}}
"""
FULL = """\
type: kcl_pipeline.KinesisPipelineComponent
template_vars_module: PACKAGE.template_vars
attributes:
  name: orders
  streams:
    - orders
    - "{{ env.SECOND }}"
    - name_or_arn: clicks
      initial_position: AT_TIMESTAMP
      timestamp: "2026-01-31T12:00:00+00:00"
  sink:
    delta:
      uri: lake/orders
      partition_by: [day]
      storage_options: {AWS_ACCOUNT: "{{ env.ACCOUNT }}"}
      schema_evolution: true
  transform: PACKAGE.functions:Nested.unchanged
  workers: {min: 2, max: "{{ env.MOST | int }}", run_tags: {team: shop, size: "{{ env.MOST }}"}}
  settings_overrides:
    lease: {failover_time_millis: 5000}
    retrieval: {fan_out_http: "1.1", consumer_name: "2"}
    shard_sync: {initial_position_in_stream: AT_TIMESTAMP, initial_timestamp: 2026-01-31T12:00:00Z}
  spark_config: {spark.executor.cores: "4"}
  aws:
    region_name: eu-west-1
    aws_access_key_id: {env: KEY}
    aws_secret_access_key: {env: SECRET}
  spark: "{{ shared_spark }}"
  leader_default_running: true
  progress_seconds: 30
  group_name: shop
  output_asset_key: lake/orders
  owners: ["team:shop"]
  tags: {tier: "1"}
  lag_threshold_seconds: 90
  scale_up_lag_seconds: null
  scale_up_cpu_percent: 70
  check_limits: {dead_letters_per_hour: 12}
  asset_attributes:
    automation_condition: "{{ eager }}"
    description: of the {{ group }}
    tags: {size: "{{ env.MOST }}"}
"""


def test_all_attributes(project, monkeypatch):  # noqa: F811
    for name, value in {
        "SECOND": "bills",
        "ACCOUNT": "0123",
        "MOST": "9",
        "KEY": "k-1",
        "SECRET": "s-1",
    }.items():
        monkeypatch.setenv(name, value)
    project.write("orders", FULL)
    component = project.component("orders")
    time = datetime(2026, 1, 31, 12, tzinfo=UTC)
    found = component.pipeline
    expected = KinesisPipeline(
        name="orders",
        streams=["orders", "bills", StreamConfig("clicks", "AT_TIMESTAMP", time)],
        sink=DeltaSink(
            "lake/orders",
            ["day"],
            storage_options={"AWS_ACCOUNT": "0123"},
            schema_evolution=True,
        ),
        transform=found.transform,
        workers=Fleet(2, 9, {"team": "shop", "size": "9"}),
        settings_overrides={
            "lease": {"failover_time_millis": 5000},
            "retrieval": {"fan_out_http": "1.1", "consumer_name": "2"},
            "shard_sync": {
                "initial_position_in_stream": "AT_TIMESTAMP",
                "initial_timestamp": time,
            },
        },
        spark_config={"spark.executor.cores": "4"},
    )
    assert found.settings == expected.settings
    assert (found.streams, found.sink, found.workers) == (
        expected.streams,
        expected.sink,
        expected.workers,
    )
    assert found.spark_config == expected.spark_config
    assert found.transform.__qualname__ == "Nested.unchanged"
    assert found.output_key == dg.AssetKey(["lake", "orders"])
    options = {name: getattr(component.options, name) for name in DagsterOptions.model_fields}
    assert options.pop("aws").region_name == "eu-west-1"
    assert options.pop("spark").app_name == "shared"
    attributes = options.pop("asset_attributes")
    assert attributes.pop("automation_condition") == dg.AutomationCondition.eager()
    assert attributes == {"description": "of the shop", "tags": {"size": "9"}}
    assert options == {
        "leader_default_running": True,
        "progress_seconds": 30,
        "group_name": "shop",
        "owners": ("team:shop",),
        "tags": {"tier": "1"},
        "lag_threshold_seconds": 90,
        "scale_up_lag_seconds": None,
        "scale_up_cpu_percent": 70,
        "check_limits": CheckLimits(dead_letters_per_hour=12),
    }
    defs = project.load()
    sensor = defs.resolve_sensor_def("orders_leader")
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    assert dg.AssetKey(["lake", "orders"]) in {s.key for s in defs.resolve_all_asset_specs()}


def test_secrets_are_not_in_the_definitions(project, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SECRET", "s-1")
    aws = "  aws: {aws_access_key_id: {env: SECRET}, aws_secret_access_key: {env: SECRET}}\n"
    project.write("orders", SMALL.format(name="orders") + aws)
    resource = project.load().get_repository_def().get_top_level_resources()["orders_aws"]
    shown = str(resource.config_schema.default_value)
    assert "{'env': 'SECRET'}" in shown
    assert "s-1" not in shown


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ("{prefix: orders-, tags: {team: shop}}", StreamSelector("orders-", {"team": "shop"})),
        ("PACKAGE.functions:names", ["orders"]),
        ("'{{ the_streams }}'", ["orders"]),
    ],
)
def test_streams_that_are_selected(project, streams, expected):  # noqa: F811
    text = SMALL.format(name="orders").replace("[orders]", streams)
    project.write("orders", text + "template_vars_module: PACKAGE.template_vars\n")
    found = project.component("orders").pipeline.streams
    assert (found() if callable(found) else found) == expected


@pytest.mark.parametrize("kind", [ForeachArrowSink, ForeachBatchSink])
def test_a_function_as_sink(project, kind):  # noqa: F811
    form = {ForeachArrowSink: "foreach_arrow", ForeachBatchSink: "foreach_batch"}[kind]
    text = SMALL.format(name="orders").replace(
        "delta: {uri: lake/orders}",
        f"{form}: {{function: 'PACKAGE.functions:write', dead_letter_uri: lake/dead}}",
    )
    project.write("orders", text)
    sink = project.component("orders").pipeline.sink
    assert isinstance(sink, kind)
    assert (sink.function.__name__, sink.dead_letter_uri) == ("write", "lake/dead")


def test_two_pipelines_in_one_code_location(project):  # noqa: F811
    project.write("orders", SMALL.format(name="orders"))
    both = SMALL.format(name="clicks") + "---\n" + SMALL.format(name="bills")
    project.write("others", both)
    defs = project.load()
    dg.Definitions.validate_loadable(defs)
    repository = defs.get_repository_def()
    for name in ("orders", "clicks", "bills"):
        assert repository.has_sensor_def(f"{name}_leader")
        assert repository.has_job(f"{name}_consume")
        assert f"{name}_aws" in repository.get_top_level_resources()
    kinesis = [s for s in defs.resolve_all_asset_specs() if s.key.path[0] == "kinesis"]
    assert [s.key.path for s in kinesis] == [["kinesis", "orders"]], "they share the stream"
    assert kinesis[0].description == "The Kinesis stream `orders`."


@pytest.mark.parametrize(("name", "other"), [("orders", "orders"), ("orders-eu", "orders_eu")])
def test_two_pipelines_of_one_name_are_named(project, name, other):  # noqa: F811
    both = SMALL.format(name=name) + "---\n" + SMALL.format(name=other)
    project.write("orders", both)
    with pytest.raises(Exception, match=r"defs.yaml\[1\]") as raised:
        project.load()
    chain = "\n".join(_chain(raised.value))
    assert f"name={other!r} is the name of another pipeline in this code location" in chain
    assert (f"{name!r} is the same name in Dagster" in chain) is (name != other)


def test_a_pipeline_is_loaded_twice(project):  # noqa: F811
    project.write("orders", SMALL.format(name="orders"))
    tree = dg.ComponentTree.for_project(project.folder)
    for _ in range(2):
        defs = tree.build_defs_at_path("orders")
        assert defs.resolve_sensor_def("orders_leader")


def test_a_component_in_python(project):  # noqa: F811
    project.write(
        "orders",
        "import dagster as dg\n"
        "from kcl_pipeline import DeltaSink, KinesisPipeline, KinesisPipelineComponent\n"
        "@dg.component_instance\n"
        "def load(context):\n"
        "    return KinesisPipelineComponent(\n"
        "        KinesisPipeline('orders', ['orders'], DeltaSink('lake/orders')), group_name='x'\n"
        "    )\n",
        "component.py",
    )
    specs = {s.key.to_user_string(): s for s in project.load().resolve_all_asset_specs()}
    assert specs["orders/orders"].group_name == "x"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("lake/orders", "'lake/orders', partition_by: [1]", "partition_by"),
        ("streams: [orders]", "streams: []", "streams"),
        ("delta: {uri: lake/orders}", "", "sink has nothing. Write one of delta"),
        (
            "streams: [orders]",
            "transform_arrow: PACKAGE.functions:unchangd\n  streams: [orders]",
            "transform_arrow PACKAGE.functions:unchangd: PACKAGE.functions has no 'unchangd'",
        ),
        (
            "streams: [orders]",
            "transform_arrow: unchanged\n  streams: [orders]",
            "transform_arrow 'unchanged' is not module:attribute",
        ),
        (
            "streams: [orders]",
            "streams: [{name_or_arn: orders, initial_position: AT_TIMESTAMP, timestamp: noon}]",
            "StreamConfig timestamp='noon' is not a time with a time zone",
        ),
        (
            "streams: [orders]",
            "workers: {min: 3, max: 2}\n  streams: [orders]",
            "Fleet max=2 is less than min=3",
        ),
        (
            "streams: [orders]",
            "settings_overrides: {lease: {failover_time_milis: 1}}\n  streams: [orders]",
            "attributes.settings_overrides.lease.failover_time_milis at .*defs.yaml:4",
        ),
    ],
)
def test_a_wrong_attribute_is_named(project, before, after, message):  # noqa: F811
    text = SMALL.format(name="orders")
    assert before in text
    path = project.write("orders", text.replace(before, after))
    with pytest.raises(Exception, match=re.escape(path.name)) as raised:
        project.load()
    chain = "\n".join(_chain(raised.value))
    expected = message.replace("PACKAGE", project.package)
    assert re.search(expected if " at " in message else re.escape(expected), chain)


def test_a_refused_value_is_reported_by_its_line_and_a_sentence(project):  # noqa: F811
    text = SMALL.format(name="orders") + "  workers: {min: 3, max: 2}\n"
    project.write("orders", text)
    with pytest.raises(Exception, match="orders") as raised:
        project.component("orders")
    said = "\n".join(_chain(raised.value))
    assert f"defs.yaml:{len(text.splitlines())} - attributes.workers" in said
    assert "Fleet max=2 is less than min=3. Write max=3 or more." in said


def _chain(error: BaseException | None) -> list[str]:
    """The texts of an error and of its causes."""
    chain = []
    while error is not None:
        chain.append(str(error))
        error = error.__cause__ or error.__context__
    return chain


def test_resources_of_the_project_by_their_keys(project):  # noqa: F811
    keys = "  aws: aws\n  spark: my_spark\n"
    project.write("orders", SMALL.format(name="orders") + keys)
    found = project.component("orders").options
    assert (found.aws, found.spark) == ("aws", "my_spark")


def test_a_subclass_changes_the_specs():
    class Mine(KinesisPipelineComponent):
        def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
            return spec.replace_attributes(owners=["team:shop"])

    component = Mine(KinesisPipeline("orders", ["orders"], DeltaSink("lake/orders")))
    defs = component.build_defs(dg.ComponentTree.for_test().load_context)
    assert [one.owners for one in defs.resolve_all_asset_specs()] == 3 * [["team:shop"]]


def test_the_loaded_class_is_the_public_one(project):  # noqa: F811
    project.write("orders", SMALL.format(name="orders"))
    assert type(project.component("orders")) is KinesisPipelineComponent


def test_a_wrong_option_in_python_is_refused():
    pipeline = KinesisPipeline("orders", ["orders"], DeltaSink("lake/orders"))
    with pytest.raises(SettingsError, match="Did you mean group_name"):
        KinesisPipelineComponent(pipeline, group_nam="x")
