"""A function as the sink works where pyspark cannot be imported and there is no Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kcl_pipeline.local import EmbeddedAws

_PIPELINE = """
from pathlib import Path

from kcl_pipeline import ForeachArrowSink, KinesisPipeline


def parse(records):
    return records.select(["shard_id", "sequence_number", "data"])


def write(rows, identity):
    with Path("rows.txt").open("ab") as file:
        file.writelines(data + b"\\n" for data in rows["data"].to_pylist())


orders = KinesisPipeline(
    "orders",
    ["orders"],
    ForeachArrowSink(write, dead_letter_uri="dead"),
    transform_arrow=parse,
    settings_overrides={
        "lease": {"failover_time_millis": 1000},
        "leader": {"leader_lease_duration_millis": 1000, "leader_heartbeat_period_millis": 250},
    },
)
"""
_SCRIPT = """
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

class NoSpark(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoSpark())

import boto3
import dagster as dg
from typer.testing import CliRunner

from functions import orders
from kcl_pipeline.cli import app

kinesis = boto3.client("kinesis")
kinesis.create_stream(StreamName="orders", ShardCount=2)
kinesis.get_waiter("stream_exists").wait(StreamName="orders")
def put(text):
    kinesis.put_record(StreamName="orders", PartitionKey=text, Data=text.encode())
put("a"); put("b")
done = CliRunner().invoke(app, ["worker", "-p", "functions:orders", "--drain"])
assert done.exit_code == 0, done.output
put("c")
defs = orders.definitions()
job = defs.resolve_implicit_global_asset_job_def()
(key,) = [key for key in job.asset_layer.executable_asset_keys if "output" in key.path]
with dg.DagsterInstance.ephemeral() as instance:
    result = job.execute_in_process(instance=instance, asset_selection=[key])
    (event,) = [e for e in result.get_asset_materialization_events() if e.asset_key == key]
    metadata = event.materialization.metadata
    assert metadata["run_records"].value == 1
    assert "table_version" not in metadata
asset = defs.resolve_assets_def(key)
assert asset.specs_by_key[key].kinds == {"kinesis", "arrow"}
assert sorted(Path("rows.txt").read_text().split()) == ["a", "b", "c"]
print("done")
"""


def test_a_function_as_the_sink_needs_neither_pyspark_nor_java(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(_PIPELINE)
    environment = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    environment |= {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    with EmbeddedAws() as aws:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            cwd=tmp_path,
            env=environment | aws.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr
