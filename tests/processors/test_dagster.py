"""A pipeline with a record processor in Dagster: its asset, its worker, and its checks."""

from __future__ import annotations

import threading

import boto3
import dagster as dg
import pytest

from kcl_pipeline import EmbeddedAws, KinesisPipeline, RecordProcessor

STREAM = "orders"
_LOCK = threading.Lock()
_DATA: list[bytes] = []


class Keeps(RecordProcessor):
    """Keeps what it gets, and checkpoints."""

    def process_records(self, process_records_input):
        with _LOCK:
            _DATA.extend(record.binary_data for record in process_records_input.records)
        process_records_input.checkpointer.checkpoint()


class Other(Keeps):
    """Another class."""


@pytest.fixture
def aws(monkeypatch):
    with EmbeddedAws() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        kinesis = boto3.client("kinesis")
        kinesis.create_stream(StreamName=STREAM, ShardCount=2)
        for number in range(20):
            kinesis.put_record(
                StreamName=STREAM, PartitionKey=f"k{number}", Data=f"v{number}".encode()
            )
        yield running


def test_a_materialization_has_the_number_of_records(aws):
    _DATA.clear()
    pipeline = KinesisPipeline("processed", [STREAM], processor=Keeps)
    definitions = pipeline.definitions()
    with dg.DagsterInstance.ephemeral() as instance:
        (output,) = [
            asset
            for asset in definitions.assets
            if isinstance(asset, dg.AssetsDefinition) and asset.is_executable
            if "one KCL worker" in str(asset.descriptions_by_key)
            or "A materialization runs one worker" in str(asset.descriptions_by_key)
        ]
        result = dg.materialize([output], instance=instance, resources=definitions.resources)
        assert result.success
        (event,) = result.asset_materializations_for_node(output.op.name)
        metadata = {name: value.value for name, value in event.metadata.items()}
    assert sorted(_DATA) == sorted(f"v{number}".encode() for number in range(20))
    assert metadata["records"] == 20
    assert metadata["run_records"] == 20
    text = str(output.descriptions_by_key)
    assert "The record processors get each record at least once" in text
    rows = boto3.client("dynamodb").scan(TableName="processed")["Items"]
    assert all(row["checkpoint"]["S"].isdigit() for row in rows if "checkpoint" in row)


def test_it_has_the_checks_of_every_pipeline():
    def checks(pipeline):
        definitions = pipeline.definitions()
        return {spec.name for check in definitions.asset_checks or () for spec in check.check_specs}

    processed = checks(KinesisPipeline("processed", [STREAM], processor=Keeps))
    assert {"lag_below_threshold"} <= processed
