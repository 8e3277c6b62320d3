"""docs/downstream.md and docs/pipes.md: what their code does with a table and with a worker."""

import importlib
import json
import re
import shutil
import sys
import types
from pathlib import Path

import boto3
import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from botocore.validate import ParamValidator
from deltalake import DeltaTable, write_deltalake

from kcl_pipeline import DeltaSink, EmbeddedAws, KinesisPipeline
from kcl_pipeline.testing import PipelineTest
from tests.guides.snippets import snippets

CDF = {"delta.enableChangeDataFeed": "true"}
PIPELINE = """
import json
import re

import pyarrow as pa

from kcl_pipeline import DeltaSink, KinesisPipeline


def parse(records):
    rows = [json.loads(one) for one in records["data"].to_pylist()]
    return pa.table({"id": [r["id"] for r in rows], "amount": [r["amount"] for r in rows]})


orders = KinesisPipeline("orders", ["orders"], DeltaSink("lake/orders"), transform_arrow=parse)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of both pages, and a pipeline without Spark."""
    (tmp_path / "my_orders.py").write_text(PIPELINE)
    for page in ("docs/downstream.md", "docs/pipes.md"):
        for one in snippets(page):
            if one.file:
                (tmp_path / one.file).write_text(one.code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("my_"):
            del sys.modules[name]


def some(*amounts):
    return pa.table({"id": [f"o-{one}" for one in amounts], "amount": [float(a) for a in amounts]})


def test_the_io_manager_reads_the_output_by_its_key(folder):
    lake = importlib.import_module("my_lake").Lake(folder="lake")
    orders = importlib.import_module("my_orders").orders
    write_deltalake("lake/orders", some(1, 2))

    @dg.asset(
        ins={"rows": dg.AssetIn(orders.output_key, input_manager_key="lake")}, io_manager_key="lake"
    )
    def doubled(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(amount=rows["amount"] * 2)

    @dg.asset(ins={"rows": dg.AssetIn("doubled", input_manager_key="lake")}, io_manager_key="lake")
    def total(rows: pd.DataFrame) -> pd.DataFrame:
        return rows[["amount"]].sum().to_frame("sum")

    job = dg.define_asset_job("both", [doubled, total])
    mine = dg.Definitions([doubled, total], jobs=[job], resources={"lake": lake})
    defs = dg.Definitions.merge(orders.definitions(), mine)
    with dg.DagsterInstance.ephemeral() as instance:
        assert defs.resolve_job_def("both").execute_in_process(instance=instance).success
    assert DeltaTable("lake/total").to_pandas()["sum"].tolist() == [6.0]


def test_polars_and_duckdb_read_the_output_by_its_key(folder):
    frames = importlib.import_module("my_frames").Frames(folder="lake")
    orders = importlib.import_module("my_orders").orders
    write_deltalake("lake/orders", some(1, 2))

    @dg.asset(
        ins={"rows": dg.AssetIn(orders.output_key, input_manager_key="lake")}, io_manager_key="lake"
    )
    def doubled(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.select(pl.col("amount") * 2)

    @dg.asset(ins={"rows": dg.AssetIn("doubled", input_manager_key="lake")}, io_manager_key="lake")
    def total(rows: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
        return rows.aggregate("sum(amount) as sum")

    job = dg.define_asset_job("both", [doubled, total])
    mine = dg.Definitions([doubled, total], jobs=[job], resources={"lake": frames})
    defs = dg.Definitions.merge(orders.definitions(), mine)
    with dg.DagsterInstance.ephemeral() as instance:
        assert defs.resolve_job_def("both").execute_in_process(instance=instance).success
    assert DeltaTable("lake/total").to_pandas()["sum"].tolist() == [6.0]


def test_the_incremental_asset_reads_each_row_once(folder):
    asset = importlib.import_module("my_new_orders").large_orders
    write_deltalake("lake/orders", some(50, 200), configuration=CDF)
    with dg.DagsterInstance.ephemeral() as instance:

        def rows_of_a_run() -> int:
            (found,) = dg.materialize([asset], instance=instance).asset_materializations_for_node(
                "large_orders"
            )
            return found.metadata["rows"].value

        assert rows_of_a_run() == 1
        assert rows_of_a_run() == 0
        write_deltalake("lake/orders", some(300), mode="append")
        write_deltalake("lake/orders", some(400, 10), mode="append")
        DeltaTable("lake/orders").optimize.compact()
        assert rows_of_a_run() == 2
        assert rows_of_a_run() == 0
    found = DeltaTable("lake/large_orders").to_pandas()
    assert sorted(found["amount"]) == [200, 300, 400]


def test_the_table_of_a_pipeline_has_the_change_data_feed():
    pipeline = KinesisPipeline("orders", ["orders"], DeltaSink("x", table_properties=CDF))
    with PipelineTest(pipeline) as test:
        test.put(b"a")
        test.run()
        test.put(b"b")
        test.run()
        table = DeltaTable(test.pipeline.sink.uri)
        assert pa.table(table.load_cdf(starting_version=0).read_all()).num_rows == 2


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning")
def test_a_worker_reports_to_the_run_that_has_started_it(folder):
    """The client of the test starts a process; those of the page start a container."""
    fleet = importlib.import_module("my_fleet")
    command = [shutil.which("kcl-pipeline", path=str(Path(sys.executable).parent))]

    @dg.op
    def work(context: dg.OpExecutionContext, client: dg.PipesSubprocessClient):
        done = client.run(
            context=context,
            command=[*command, *fleet.WORKER[1:], "--drain"],
            env={"PYTHONPATH": str(folder)},
        )
        fleet.report(context, done.get_custom_messages())

    @dg.job(resource_defs={"client": dg.PipesSubprocessClient()})
    def job():
        work()

    with EmbeddedAws() as aws, pytest.MonkeyPatch.context() as patch:
        for name, value in aws.environment().items():
            patch.setenv(name, value)
        kinesis = boto3.client("kinesis")
        kinesis.create_stream(StreamName="orders", ShardCount=1)
        kinesis.get_waiter("stream_exists").wait(StreamName="orders")
        data = json.dumps({"id": "a", "amount": 1.0}).encode()
        kinesis.put_record(StreamName="orders", PartitionKey="a", Data=data)
        with dg.DagsterInstance.ephemeral() as instance:
            result = job.execute_in_process(instance=instance)
            assert result.success
            (event,) = result.get_asset_materialization_events()
            messages = [one.message for one in instance.all_logs(result.run_id)]
    assert event.materialization.asset_key == fleet.orders.output_key
    assert event.materialization.metadata["records"].value == 1
    assert any("drained" in message for message in messages)


class StubClient:
    """Stands for a Pipes client: keeps what the op starts, and returns messages of a worker."""

    def __init__(self, **given):
        self.started = {}

    def run(self, **started):
        self.started.update(started)
        return self

    def get_custom_messages(self):
        ended = {"worker_id": "w-1", "reason": "stopped", "dead_letters": 0}
        return [ended | {"records": 3, "rows_written": 3, "batches": 1}, ended | {"batches": 0}]


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning")
@pytest.mark.parametrize(
    ("op", "service", "call", "argument"),
    [
        ("worker_on_ecs", "ecs", "RunTask", "run_task_params"),
        ("worker_on_emr", "emr-containers", "StartJobRun", "start_job_run_params"),
        ("worker_on_kubernetes", None, None, None),
    ],
)
def test_the_recipe_starts_a_worker_and_reports_its_end(
    folder, monkeypatch, op, service, call, argument
):
    """The request of a recipe fits AWS, and one materialization has what a worker committed."""
    monkeypatch.setitem(
        sys.modules, "dagster_k8s", types.SimpleNamespace(PipesK8sClient=StubClient)
    )
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    (code,) = (one.code for one in snippets("docs/pipes.md") if f"def {op}(" in one.code)
    found = re.sub(r"(ecs|emr|k8s): [\w.\[\]]+", r"\1", code)  # a stub is no resource of a type
    names = {"dg": dg, **vars(importlib.import_module("my_fleet"))}
    exec(found.replace("@dg.op", "").partition("@dg.job")[0], names)
    client = StubClient()

    @dg.op
    def start(context: dg.OpExecutionContext):
        names[op](context, client)

    @dg.job
    def job():
        start()

    result = job.execute_in_process()
    (event,) = result.get_asset_materialization_events()
    assert event.materialization.asset_key == names["orders"].output_key
    assert event.materialization.metadata["rows_written"].value == 3
    if service is None:
        assert client.started["command"] == names["WORKER"]
        return
    model = boto3.client(service).meta.service_model.operation_model(call)
    given = {"clientToken": "x" * 8} | client.started[argument]
    report = ParamValidator().validate(given, model.input_shape)
    assert not report.has_errors(), report.generate_report()
