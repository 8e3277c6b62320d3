"""The specs of the assets, as Dagster and its UI know them."""

import functools
import inspect
import re
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from kcl_pipeline import (
    RECORD_SCHEMA,
    AwsResource,
    DeltaSink,
    Fleet,
    ForeachArrowSink,
    KinesisPipeline,
    SettingsError,
    SparkResource,
)
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.specs import OutputTable, table_name
from kcl_pipeline.testing.clock import VirtualClock

STREAM = dg.AssetKey(["kinesis", "orders"])


def parse(records: pa.Table) -> pa.Table:
    return records


def write(rows: pa.Table, identity: object) -> None:
    """A sink."""


def pipeline(**changes):
    arguments = {
        "name": "orders",
        "streams": ["orders"],
        "sink": DeltaSink("s3://lake/orders_per_minute"),
        "transform_arrow": parse,
    }
    return KinesisPipeline(**arguments | changes)


def output(made: KinesisPipeline, **options) -> dg.AssetSpec:
    defs = made.definitions(**options)
    dg.Definitions.validate_loadable(defs)
    return defs.resolve_assets_def(made.output_key).get_asset_spec(made.output_key)


def test_the_output_has_the_standard_metadata():
    spec = output(pipeline(workers=Fleet(code_version="abc")))
    assert spec.key == pipeline().output_key == dg.AssetKey(["orders", "orders_per_minute"])
    assert spec.metadata["dagster/table_name"] == "lake.orders_per_minute"
    assert spec.metadata["dagster/uri"] == "s3://lake/orders_per_minute"
    assert spec.kinds == {"kinesis", "arrow", "deltalake"}
    assert spec.code_version
    assert spec.code_version != output(pipeline(workers=Fleet(code_version="abd"))).code_version
    assert [one.asset_key for one in spec.deps] == [STREAM]


@pytest.mark.parametrize(
    ("changes", "function"),
    [
        ({}, parse),
        ({"transform_arrow": functools.partial(parse)}, parse),
        ({"transform_arrow": None, "transform": parse}, parse),
        ({"sink": ForeachArrowSink(write), "transform_arrow": None}, write),
    ],
)
def test_the_code_reference_is_that_of_the_users_function(changes, function):
    (found,) = output(pipeline(**changes)).metadata["dagster/code_references"].code_references
    assert found.file_path == str(Path(__file__).resolve())
    assert found.line_number == inspect.getsourcelines(function)[1]
    assert found.label == function.__qualname__


def test_the_columns_of_a_stream_are_those_of_its_records():
    defs = pipeline().definitions()
    (spec,) = (one for one in defs.resolve_all_asset_specs() if one.key == STREAM)
    columns = spec.metadata["dagster/column_schema"].columns
    assert [one.name for one in columns] == RECORD_SCHEMA.names


def test_the_lineage_of_columns_is_known_without_a_function():
    assert "dagster/column_lineage" not in output(pipeline()).metadata
    lineage = output(pipeline(transform_arrow=None)).metadata["dagster/column_lineage"]
    assert lineage.deps_by_column["data"] == [dg.TableColumnDep(STREAM, "data")]
    assert set(lineage.deps_by_column) == set(RECORD_SCHEMA.names)


def test_asset_attributes_replace_those_of_the_package_and_merge_tags_and_metadata():
    condition = dg.AutomationCondition.on_cron("@daily")
    spec = output(
        pipeline(),
        tags={"domain": "shop"},
        owners=["team:shop"],
        group_name="shop",
        asset_attributes={
            "automation_condition": condition,
            "kinds": {"delta"},
            "description": "Orders",
            "tags": {"tier": "1"},
            "metadata": {"runbook": "https://example.com"},
        },
    )
    assert spec.automation_condition == condition
    assert (spec.kinds, spec.description, spec.group_name) == ({"delta"}, "Orders", "shop")
    assert spec.owners == ["team:shop"]
    assert spec.tags.items() >= {"domain": "shop", "tier": "1"}.items()
    assert spec.metadata["runbook"] == "https://example.com"
    assert spec.metadata["dagster/table_name"] == "lake.orders_per_minute"


def test_a_function_gets_the_spec_of_each_asset():
    def change(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(group_name="all")

    specs = pipeline().definitions(asset_attributes=change).resolve_all_asset_specs()
    assert {one.key.to_user_string(): one.group_name for one in specs} == {
        "orders/orders_per_minute": "all",
        "kinesis/orders": "all",
        "orders/fleet": "all",
    }


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kidns": 1}, "asset_attributes['kidns'] is not an attribute of the output that can be"),
        ({"key": "a"}, "Write one of automation_condition, code_version, description"),
        ("x", "asset_attributes='x' is not a function. Write asset_attributes=a dictionary"),
        (lambda: 1, "cannot be called with one argument (spec)"),
        (lambda spec: None, "asset_attributes returned NoneType for the asset orders/orders_per"),
        (
            lambda spec: spec.replace_attributes(key="a"),
            "gives the asset orders/orders_per_minute the key a. Keep the key; write",
        ),
    ],
)
def test_wrong_asset_attributes(given, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        pipeline().definitions(asset_attributes=given)


def test_the_resources_of_the_user_are_used_and_not_replaced():
    aws = AwsResource(region_name="eu-central-1")
    mine = {"aws": aws, "my_spark": SparkResource(app_name="shared")}
    defs = pipeline().definitions(aws="aws", spark="my_spark")
    assert {"orders_aws", "orders_spark", *mine}.isdisjoint(defs.resources or {})
    merged = dg.Definitions.merge(defs, dg.Definitions(resources=mine))
    dg.Definitions.validate_loadable(merged)
    seen = []

    @dg.op(required_resource_keys={"orders_lease_table"})
    def look(context: dg.OpExecutionContext) -> None:
        seen.append(context.resources.orders_lease_table)

    @dg.job(resource_defs=dict(merged.resources or {}), executor_def=dg.in_process_executor)
    def job() -> None:
        look()

    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance).success
    assert seen[0].aws.region_name == "eu-central-1"
    assert seen[0].table().name == "orders"


def test_a_key_of_another_resource_is_refused():
    defs = pipeline().definitions(aws="aws")

    @dg.op(required_resource_keys={"orders_lease_table"})
    def look(context: dg.OpExecutionContext) -> None: ...

    @dg.job(resource_defs={**(defs.resources or {}), "aws": dg.ResourceDefinition.none_resource()})
    def job() -> None:
        look()

    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(dg.DagsterResourceFunctionError) as raised,
    ):
        job.execute_in_process(instance=instance)
    sentence = "aws='aws' is the key of a NoneType, not of an AwsResource. Write"
    assert sentence in str(raised.value.user_exception)


def test_columns_and_rows_come_from_the_table(tmp_path):
    uri = str(tmp_path / "orders")
    table = OutputTable(DeltaSink(uri), VirtualClock(), {})
    assert table.metadata() == {}
    rows = pa.table(
        {
            "id": pa.array(["a", "b"]),
            "tags": pa.array([["x"], []], pa.list_(pa.string())),
            "at": pa.array([{"x": 1}, None], pa.struct([("x", pa.int64())])),
        }
    )
    write_deltalake(uri, rows)
    found = table.metadata()
    assert found["dagster/row_count"] == 2
    columns = found["dagster/column_schema"].columns
    assert [(one.name, one.type) for one in columns] == [
        ("id", "string"),
        ("tags", "array<string>"),
        ("at", "struct<x: long>"),
    ]
    assert table.metadata_within(60) == found


def test_rows_are_counted_in_a_small_part_of_the_time(tmp_path):
    class SlowClock(VirtualClock):
        def monotonic(self):
            self.sleep(1.0)
            return super().monotonic()

    clock = SlowClock()
    table = OutputTable(DeltaSink(str(tmp_path)), clock, {})
    write_deltalake(str(tmp_path), pa.table({"id": ["a"]}))
    counts = [table.metadata().get("dagster/row_count") for _ in range(24)]
    assert counts[:2] == [1, None]
    assert counts.count(1) == 2
    assert len(table.metadata()["dagster/column_schema"].columns) == 1


def test_a_sink_that_is_no_table_has_no_columns():
    assert OutputTable(ForeachArrowSink(write), VirtualClock(), {}).metadata() == {}


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("s3://lake/orders", "lake.orders"),
        ("s3://lake/a/b/orders/", "b.orders"),
        ("lake/orders", "lake.orders"),
        ("orders", "orders"),
        ("/data/lake/orders", "lake.orders"),
    ],
)
def test_names_of_tables(uri, name):
    assert table_name(uri) == name


def test_options_are_one_model():
    options = DagsterOptions(group_name="shop", tags=None)
    specs = build_definitions(pipeline(), options).resolve_all_asset_specs()
    assert {one.group_name for one in specs} == {"shop", "kinesis"}
