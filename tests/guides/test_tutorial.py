"""The tutorial works as written: every file and command, in order, in an empty folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress

import boto3
import pytest
import requests

from kcl_pipeline.cli.init import project_files
from kcl_pipeline.local.demo.dagster_client import DagsterClient, Run
from tests.guides.snippets import ROOT, TUTORIAL, commands, snippets
from tests.guides.walkthrough import Walkthrough
from tests.support.fleet_processes import wait_until
from tests.support.project_definitions import project_definitions

PAGE = (ROOT / TUTORIAL).read_text(encoding="utf-8")
COUNTED = re.compile(r"^(\d+) rows, (\d+) ids, version \d+$", re.MULTILINE)
START_SECONDS = 300


class Reader(Walkthrough):
    """Does what the tutorial says, and checks what it says about the results."""

    def follow(self, words: list[str]) -> None:
        self.run(words)
        if words[:2] == ["dagster", "dev"]:
            wait_until(lambda: self.materialized("purchases"), START_SECONDS, "first rows")
            wait_until(
                lambda: self.materialized("revenue_per_minute"), START_SECONDS, "what follows"
            )
            wait_until(
                lambda: self.owners() == [2, 2], START_SECONDS, "two workers with two leases each"
            )
            assert self.log("dagster").count("no AWS_* variable names") == 1
        elif words[1:2] == ["dead-letters"]:
            assert re.match(r"[1-9]\d* dead letters?\b", self.output), self.output
        elif words[1:2] == ["leases"]:
            assert self.output.count("shardId-") >= 4

    @property
    def dagster(self) -> DagsterClient:
        return DagsterClient(self.url)

    def materialized(self, name: str) -> bool:
        assert self.is_running("dagster"), self.log("dagster")
        query = """query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {
            assetMaterializations(limit: 1) { timestamp } } } }"""
        asked = {"query": query, "variables": {"key": {"path": ["purchases", name]}}}
        with suppress(requests.ConnectionError):
            answer = requests.post(f"{self.url}/graphql", json=asked, timeout=30).json()
            return bool(answer["data"]["assetOrError"].get("assetMaterializations"))
        return False

    def running(self) -> list[Run]:
        return [run for run in self.dagster.runs("purchases_consume") if run.status == "STARTED"]

    def owners(self) -> list[int]:
        """The numbers of leases of the workers that have one."""
        server = json.loads((self.folder / ".run" / "local-aws.json").read_text())
        dynamodb = boto3.client(
            "dynamodb",
            region_name="us-east-1",
            endpoint_url=server["endpoint_url"],
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
        rows = dynamodb.scan(TableName="purchases", ConsistentRead=True)["Items"]
        return sorted(
            Counter(row["leaseOwner"]["S"] for row in rows if "leaseOwner" in row).values()
        )

    def terminate_one(self) -> None:
        (stopped, *_) = self.running()
        self.dagster.terminate(stopped.run_id)
        wait_until(lambda: self.dagster.status(stopped.run_id) == "CANCELED", 60, "the run to end")
        wait_until(lambda: self.owners() == [4], 30, "the other worker to hold all leases")
        wait_until(lambda: self.owners() == [2, 2], 180, "a new worker to have two leases")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_tutorial_works_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # the page says that no Java is needed
    reader = Reader(tmp_path)
    stopped = PAGE[: PAGE.index("press *Terminate*")].count("\n")
    counts = []
    try:
        for snippet in snippets(TUTORIAL):
            if stopped is not None and stopped < snippet.line:
                stopped = reader.terminate_one()
            if snippet.language == "python" and snippet.file is None:
                assert snippet.code in (reader.folder / "assets" / "purchases.py").read_text()
            elif snippet.language == "python":
                (reader.folder / str(snippet.file)).write_text(snippet.code)
            else:
                for words in commands(snippet.code):
                    reader.follow(words)
                    counts += COUNTED.findall(reader.output) if words[1:] == ["look.py"] else []
        for run in reader.running():
            reader.dagster.terminate(run.run_id)
        wait_until(lambda: not reader.running(), 60, "the runs to end")
    finally:
        reader.stop_all()
    (before, distinct), (after, distinct_after) = counts
    assert (before, after) == (distinct, distinct_after)
    assert 0 < int(before) < int(after)


def test_the_names_in_the_tutorial_exist(tmp_path):
    for path, text in project_files("purchases", "purchases").items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    with project_definitions(tmp_path) as defs:
        graph = defs.resolve_asset_graph()
        assets = {key.to_user_string() for key in graph.get_all_asset_keys()}
        checks = {key.name for key in graph.asset_check_keys}
        sensors, jobs = {one.name for one in defs.sensors}, {one.name for one in defs.jobs}
    named = set(re.findall(r"`((?:purchases|kinesis)/\w+)`", PAGE))
    assert named <= assets
    assert named == {
        "kinesis/purchases",
        "purchases/purchases",
        "purchases/fleet",
        "purchases/revenue_per_minute",
    }
    assert "lag_below_threshold" in checks
    assert "purchases_leader" in sensors
    assert "purchases_consume" in jobs
    files = re.findall(r"`([\w/]+(?:/|\.py))`", PAGE)
    assert {path for path in files if not (tmp_path / path).exists()} == {"look.py"}
