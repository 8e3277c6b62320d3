"""The tutorial works as written: every file and command, in order, in an empty folder."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from contextlib import suppress

import boto3
import pytest
import requests

from kcl_pipeline.local.demo.dagster_client import DagsterClient, Run
from tests.guides.snippets import ROOT, TUTORIAL, commands, snippets
from tests.guides.walkthrough import Walkthrough
from tests.support.fleet_processes import wait_until

PAGE = (ROOT / TUTORIAL).read_text(encoding="utf-8")
SECONDS_OF_PUTTING = 20
"""The tutorial puts records for 180 seconds, so that there is time to look around."""
ROWS = 99 * (10 + SECONDS_OF_PUTTING)
COUNTED = re.compile(r"^(\d+) rows, (\d+) ids, version \d+$", re.MULTILINE)


class Reader(Walkthrough):
    """Does what the tutorial says, and checks what it says about the results."""

    def follow(self, words: list[str]) -> None:
        if words == ["python", "put_views.py", "180"]:
            wait_until(self._is_loaded, 120, "Dagster to load the code")
            self.start("put", self._command(["python", "put_views.py", str(SECONDS_OF_PUTTING)]))
            return
        self.run(words)
        if words[1:2] == ["worker"]:
            assert "drained: 1,000 records" in self.output
        elif words[1:2] == ["doctor"]:
            assert "0 problems, 3 warnings" in self.output
        elif words[1:2] == ["dead-letters"]:
            assert self.output.startswith("10 dead letters")
        elif words[:3] == ["dagster", "sensor", "start"]:
            wait_until(lambda: self.owners() == [2, 2], 180, "two workers with two leases each")

    @property
    def dagster(self) -> DagsterClient:
        return DagsterClient(self.url)

    def _is_loaded(self) -> bool:
        assert self.is_running("dagster"), self.log("dagster")
        with suppress(requests.ConnectionError):
            return self.dagster.loaded() is not None
        return False

    def running(self) -> list[Run]:
        return [run for run in self.dagster.runs("views_consume") if run.status == "STARTED"]

    def owners(self) -> list[int]:
        """The numbers of leases of the workers that have one."""
        clients = {"region_name": "us-east-1", "endpoint_url": self.environment["AWS_ENDPOINT_URL"]}
        dynamodb = boto3.client(
            "dynamodb", aws_access_key_id="local", aws_secret_access_key="local", **clients
        )
        rows = dynamodb.scan(TableName="views", ConsistentRead=True)["Items"]
        held = Counter(row["leaseOwner"]["S"] for row in rows if "leaseOwner" in row)
        return sorted(held.values())

    def terminate_one(self) -> None:
        (stopped, *_) = self.running()
        self.dagster.terminate(stopped.run_id)
        wait_until(lambda: self.dagster.status(stopped.run_id) == "CANCELED", 60, "the run to end")
        wait_until(lambda: self.owners() == [4], 30, "the other worker to hold all leases")
        wait_until(lambda: self.owners() == [2, 2], 180, "a new worker to have two leases")

    def count(self) -> tuple[int, int]:
        """The rows and ids in the table, as look.py prints them."""
        self.run(["python", "look.py"])
        ((rows, ids),) = COUNTED.findall(self.output)
        return int(rows), int(ids)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_tutorial_works_as_written(tmp_path):
    reader = Reader(tmp_path)
    stopped = PAGE[: PAGE.index("press *Terminate*")].count("\n")
    counted = PAGE[: PAGE.index("Count again")].count("\n")
    waits = [(stopped, reader.terminate_one)]
    waits.append((counted, lambda: wait_until(lambda: not reader.is_running("put"), 120, "put")))
    waits.append((counted, lambda: wait_until(lambda: reader.count()[0] >= ROWS, 120, "all rows")))
    counts = []
    try:
        for one in snippets(TUTORIAL):
            while waits and waits[0][0] < one.line:
                waits.pop(0)[1]()
            if one.language == "python":
                assert one.file, f"the page does not name the file of line {one.line}"
                (tmp_path / one.file).write_text(one.code)
                continue
            assert one.language == "shell"
            for words in commands(one.code):
                reader.follow(words)
                counts += COUNTED.findall(reader.output) if words[1:] == ["look.py"] else []
        for run in reader.running():
            reader.dagster.terminate(run.run_id)
        wait_until(lambda: not reader.running(), 60, "the runs to end")
    finally:
        reader.stop_all()
    assert counts == [("990", "990"), (str(ROWS), str(ROWS))]
    assert not waits


def test_the_names_in_the_tutorial_exist(tmp_path):
    (code,) = (one.code for one in snippets(TUTORIAL) if one.file == "my_views.py")
    (tmp_path / "my_views.py").write_text(code)
    spec = importlib.util.spec_from_file_location("tutorial_views", tmp_path / "my_views.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    graph = module.defs.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    named = set(re.findall(r"`((?:views|kinesis)/\w+)`", PAGE))
    assert named <= keys
    assert named == {"kinesis/page_views", "views/views", "views/fleet"}
    checks = {key.name for key in graph.asset_check_keys}
    assert "lag_below_threshold" in checks
    assert {sensor.name for sensor in module.defs.sensors} == {"views_leader"}
    assert "views_consume" in {job.name for job in module.defs.jobs}
