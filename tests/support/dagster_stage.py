"""`dagster dev` with a small pipeline on the embedded AWS, for the tests that look at it from
outside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.demo.dagster_client import DagsterClient, Run
from kcl_pipeline.local.demo.processes import Processes, free_port
from kcl_pipeline.local.demo.table import CommittedRows
from tests.support.fleet_processes import CLOCK, PIPELINES, wait_until

JOB = "orders_consume"
SHARDS = 3
REPORTED = """query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {
  assetMaterializations(limit: 10) { metadataEntries { label } } } } }"""

EVALUATED = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetChecksOrError { ... on AssetChecks { checks {
    name executionForLatestMaterialization { status } } } } } } }"""


class Stage:
    """What the tests see: the page, the stream, the tables, and the ledger of published ids."""

    def __init__(self, aws: EmbeddedAws, folder: Path, processes: Processes, url: str) -> None:
        clients = {
            "endpoint_url": aws.endpoint_url,
            "region_name": "us-east-1",
            "aws_access_key_id": "a",
            "aws_secret_access_key": "b",
        }
        self.kinesis = boto3.client("kinesis", **clients)
        self.dynamodb = boto3.client("dynamodb", **clients)
        self.processes = processes
        self.page = DagsterClient(url)
        self.location = ("", "")
        self.table = str(folder / "events")
        self.rows = CommittedRows(self.table)
        self.ids: list[str] = []

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
        try:
            wait_until(condition, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.processes.log_text('dagster')[-6000:]}") from None

    def loaded(self) -> bool:
        self.location = self.page.loaded() or ("", "")
        return self.location != ("", "")

    def publish(self, count: int) -> None:
        ids = [f"o{number:06d}" for number in range(len(self.ids), len(self.ids) + count)]
        answer = self.kinesis.put_records(
            StreamName="orders",
            Records=[
                {"Data": json.dumps({"id": one}).encode(), "PartitionKey": one} for one in ids
            ],
        )
        assert answer["FailedRecordCount"] == 0
        self.ids.extend(ids)

    def runs(self, *statuses: str) -> list[Run]:
        return [run for run in self.page.runs(JOB) if run.status in statuses]

    def leases(self) -> list[dict[str, dict[str, str]]]:
        try:
            return self.dynamodb.scan(TableName="orders", ConsistentRead=True)["Items"]
        except self.dynamodb.exceptions.ResourceNotFoundException:
            return []

    def reports(self) -> list[set[str]]:
        """The names of the metadata of each materialization of the output."""
        found = self.page.ask(REPORTED, key={"path": ["orders", "events"]})["assetOrError"]
        return [
            {entry["label"] for entry in report["metadataEntries"]}
            for report in found.get("assetMaterializations", ())
        ]

    def evaluated(self) -> dict[str, bool]:
        """By name, whether the page shows a result of a check of the output."""
        node = self.page.ask(EVALUATED, key={"path": ["orders", "events"]})["assetNodeOrError"]
        return {
            check["name"]: check["executionForLatestMaterialization"] is not None
            for check in node["assetChecksOrError"]["checks"]
        }

    def reported(self, times: int = 1, label: str | None = None) -> bool:
        """Whether so many materializations of the output were reported, with metadata so named."""
        return sum(label is None or label in names for names in self.reports()) >= times

    def consuming(self) -> bool:
        """Whether a run of the sensor's holds every lease, and everything published is in the
        table.
        """
        rows = self.leases()
        return (
            len(rows) == SHARDS
            and all("leaseOwner" in row for row in rows)
            and self.rows.count() >= len(self.ids)
        )


@contextmanager
def dagster_stage(folder: Path) -> Iterator[Stage]:
    """Everything up, one continuous worker of the sensor's consuming, 500 records in the table."""
    with EmbeddedAws() as aws:
        processes = Processes(
            folder,
            CLOCK,
            {**aws.environment(), "FLEET_LAKE": str(folder), "PYTHONPATH": str(PIPELINES)},
        )
        try:
            port = free_port(0)
            stage = Stage(aws, folder, processes, f"http://127.0.0.1:{port}")
            stage.kinesis.create_stream(StreamName="orders", ShardCount=SHARDS)
            stage.publish(500)
            processes.start_dagster("page_orders", port)
            stage.wait("Dagster to load the code", stage.loaded, 90)
            stage.wait("the sensor's worker to consume", stage.consuming, 90)
            # A page that is opened before the first report shows it only when it is loaded again.
            stage.wait("the first report of the output", stage.reported, 90)
            yield stage
        finally:
            processes.stop_all()
