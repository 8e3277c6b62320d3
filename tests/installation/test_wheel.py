"""The wheel alone, with the core requirements only, runs a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import boto3
import pytest
from packaging.requirements import Requirement

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.version import __version__
from tests.installation.wheel import build_wheel, lean_environment

NOT_REQUIRED = ["dagster_webserver", "flask", "greenlet", "h2", "moto", "pytest", "werkzeug"]
RECORDS = 200
PIPELINE = """
from kcl_pipeline import DeltaSink, KinesisPipeline


def lengths(records):
    return records.append_column("size", [[len(v) for v in records["data"].to_pylist()]])


lean = KinesisPipeline(
    name="lean",
    streams=["lean"],
    sink=DeltaSink("lake/lean"),
    transform_arrow=lengths,
)
"""


LOOK = f"""
import importlib
import importlib.util
import json
import pkgutil

import kcl_pipeline
from typer.testing import CliRunner

from kcl_pipeline.cli import app

there = [name for name in {NOT_REQUIRED} if importlib.util.find_spec(name)]
pipeline = ("--pipeline", "lean_pipeline:lean")
worker = CliRunner().invoke(app, ["worker", *pipeline, "--drain"])
doctor = CliRunner().invoke(app, ["doctor", *pipeline, "--json"])
local = CliRunner().invoke(app, ["local", "--port", "0"])
init = CliRunner().invoke(app, ["init", "my_events"])

from deltalake import DeltaTable

from kcl_pipeline.delta.dead_letters import read_rows

rows = read_rows(DeltaTable("lake/lean"), "select size from rows")
skipped = (
    "kcl_pipeline.local.", "kcl_pipeline.cli.__main__", "kcl_pipeline.kinesis.fan_out.http2"
)
names = [each.name for each in pkgutil.walk_packages(kcl_pipeline.__path__, "kcl_pipeline.")]
for name in names:
    if not name.startswith(skipped):
        importlib.import_module(name)
print(json.dumps({{
    "there": there,
    "codes": [worker.exit_code, doctor.exit_code, local.exit_code, init.exit_code],
    "worker": worker.stderr,
    "local": local.stderr,
    "levels": [found["level"] for found in json.loads(doctor.stdout)],
    "bytes": sum(rows["size"].to_pylist()),
    "modules": len(names),
}}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def python(wheel, metadata, tmp_path_factory):
    return lean_environment(
        tmp_path_factory.mktemp("lean") / "venv", wheel, metadata.get_all("Requires-Dist")
    )


def run(*command, cwd=None, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
        cwd=cwd or Path(str(command[0])).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_has_the_product_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "kcl_pipeline",
        f"kcl_pipeline-{__version__}.dist-info",
    }
    assert [n for n in names if Path(n).name.startswith(("test_", "conftest"))] == []
    assert "kcl_pipeline/py.typed" in names
    for java in ("RecordsInMemory", "ResultInMemory"):
        assert f"kcl_pipeline/spark/arrow_memory/{java}.java" in names
    assert not any("hypothesis" in n or "verification" in n for n in names)


def test_the_metadata_has_a_license_expression_and_no_missing_site(wheel, metadata):
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None
    extras = "dev docs http2 local otel prometheus testing webserver"
    assert set(metadata.get_all("Provides-Extra")) == set(extras.split())
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)


def test_the_command_prints_its_version(python):
    command = python.parent / "kcl-pipeline"
    assert run(command, "--version").stdout == f"kcl-pipeline {__version__}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the wheel is used."""
    made = tmp_path_factory.mktemp("used")
    (made / "lean_pipeline.py").write_text(PIPELINE)
    return made


@pytest.fixture(scope="module")
def looked(python, folder):
    """What one process of the lean environment has done: each one imports for two seconds."""
    with EmbeddedAws() as aws:
        client = boto3.Session("local", "local", region_name=aws.region).client(
            "kinesis", endpoint_url=aws.endpoint_url
        )
        client.create_stream(StreamName="lean", ShardCount=2)
        client.put_records(
            StreamName="lean",
            Records=[{"Data": b"x" * n, "PartitionKey": str(n)} for n in range(1, RECORDS + 1)],
        )
        environment = {**aws.environment(), "PYTHONPATH": str(folder)}
        done = run(python, "-c", LOOK, cwd=folder, **environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_modules_of_the_extras_are_not_there(looked):
    assert looked["there"] == []


def test_every_module_of_the_product_imports(looked):
    assert looked["modules"] > 200


def test_a_worker_writes_the_table(looked):
    worker, doctor, _, _ = looked["codes"]
    assert (worker, doctor) == (0, 0)
    assert f"{RECORDS} records" in looked["worker"]
    assert {*looked["levels"]} <= {"ok", "unknown", "warning"}
    assert looked["bytes"] == sum(range(1, RECORDS + 1))


def test_a_command_names_its_missing_extra(looked):
    _, _, local, _ = looked["codes"]
    assert local == 1
    assert looked["local"] == (
        "Error: the embedded AWS needs an extra (missing: moto, flask, flask_cors, werkzeug, h2): "
        "pip install 'kcl-pipeline[local]'\n"
    )


def test_the_templates_of_a_project_are_in_the_wheel(looked, folder):
    *_, init = looked["codes"]
    assert init == 0
    assert (folder / "my_events" / "tests" / "test_my_events.py").exists()


def test_the_core_requirements_are_the_ones_of_pyproject(metadata):
    core = [r for r in map(Requirement, metadata.get_all("Requires-Dist")) if r.marker is None]
    assert {r.name for r in core} >= {"dagster-aws", "dagster-pyspark", "pandas", "pyspark"}
