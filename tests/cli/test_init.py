"""`kcl-pipeline init`: the project that it writes is tested, loaded and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import yaml
from dagster._config import process_config, resolve_to_config_type
from dagster._core.instance.config import dagster_instance_config_schema

from kcl_pipeline.cli.init import project_files
from kcl_pipeline.local import EmbeddedAws
from tests.guides.snippets import check_requirement
from tests.support.cli_fleet import run, run_json

ROOT = Path(__file__).parents[2]
FILES = [
    "definitions.py",
    "assets/__init__.py",
    "assets/my_events.py",
    "assets/telemetry.py",
    "assets/revenue.py",
    "resources/__init__.py",
    "resources/samples.py",
    "sensors/__init__.py",
    "tests/test_my_events.py",
    "workspace.yaml",
    "dagster.yaml",
    "pyproject.toml",
    "requirements.txt",
    "requirements-dev.txt",
    ".gitignore",
    "README.md",
]

PUT = """
import json, boto3
from resources.samples import records
data = [one if isinstance(one, bytes) else json.dumps(one) for one in records(0)["events"]]
boto3.client("kinesis").put_records(
    StreamName="events",
    Records=[{"Data": one, "PartitionKey": str(number)} for number, one in enumerate(data)],
)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_the_files_of_a_project(here):
    found = run_json("init", "my_events", "--stream", "events")
    assert found == {
        "folder": "my_events",
        "name": "my_events",
        "stream": "events",
        "files": FILES,
        "overwritten": [],
    }
    texts = written(here / "my_events")
    assert sorted(texts) == sorted(FILES)
    assert not [path for path, text in texts.items() if "@NAME@" in text or "@STREAM@" in text]
    assert not [path for path, text in texts.items() if "orders" in text]
    assert 'streams=["events"]' in texts["assets/my_events.py"]
    for line in texts["requirements.txt"].splitlines():
        check_requirement(line)


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [("my_events", "next: cd my_events, then dagster dev;"), (".", "next: dagster dev;")],
)
def test_the_last_line_says_what_to_do_next(here, folder, sentence):
    said = run("init", folder, "--name", "my_events").stdout
    assert said.splitlines()[-1].startswith(sentence)


def test_files_are_not_overwritten_without_force(here):
    (here / "my_events").mkdir()
    mine = here / "my_events" / "README.md"
    mine.write_text("mine")
    said = run("init", "my_events", code=1).stderr
    assert "my_events has README.md already" in said
    assert "--force" in said
    assert written(here / "my_events") == {"README.md": "mine"}
    assert run_json("init", "my_events", "--force")["overwritten"] == ["README.md"]
    assert mine.read_text().startswith("# my_events")
    assert len(run_json("init", "my_events", "--force")["overwritten"]) == len(FILES)


def test_a_link_counts_as_a_file(here):
    (here / "my_events").mkdir()
    (here / "my_events" / "README.md").symlink_to(here / "elsewhere.md")
    assert "has README.md already" in run("init", "my_events", code=1).stderr
    assert not (here / "elsewhere.md").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["my-events"], "'my-events' is not a Python identifier"),
        (["my-events"], "write for example --name my_events"),
        (["1st"], "'1st' is not a Python identifier"),
        (["класс"], "is not a Python identifier"),
        (["class"], "write for example --name my_pipeline"),
        (["ab"], "of 3 to 100 of the characters"),
        (["x", "--name", "a.b"], "'a.b' is not a Python identifier"),
        (["json"], "is the name of another module or folder; write for example --name my_json"),
        (["pandas"], "is the name of another module"),
        (["tests"], "is the name of another module or folder"),
        (["my_events", "--stream", "a b"], "--stream 'a b' is not a stream name"),
        (["my_events", "--stream", 'x"]'], "is not a stream name"),
        (["my_events", "--stream", "telemetry"], "is the stream of the project's second pipeline"),
        (["telemetry"], "is the name of another module or folder"),
    ],
)
def test_names_that_cannot_be(arguments, sentence, here):
    said = run("init", *arguments, code=1).stderr
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert list(here.iterdir()) == []


def test_a_folder_that_is_a_file(here):
    (here / "my_events").write_text("")
    assert "choose another folder" in run("init", "my_events", code=1).stderr


def test_the_current_folder(here, monkeypatch):
    (here / "my_events").mkdir()
    monkeypatch.chdir(here / "my_events")
    monkeypatch.syspath_prepend(str(here / "my_events"))
    assert run_json("init", ".")["name"] == "my_events"
    assert run_json("init", ".", "--force")["overwritten"] == FILES


def test_the_settings_of_dagster_are_valid():
    text = project_files("my_events", "events")["dagster.yaml"]
    schema = resolve_to_config_type(dagster_instance_config_schema())
    outcome = process_config(schema, yaml.safe_load(text))
    assert outcome.success, outcome.errors


def in_project(folder: Path, *command: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "DAGSTER_"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "AWS_EC2_METADATA_DISABLED": "true", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{(done.stdout + done.stderr)[-6000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_project_is_tested_loaded_and_run(here):
    run("init", "my_events", "--stream", "events")
    folder = here / "my_events"
    python = sys.executable
    assert "3 passed" in in_project(folder, python, "-m", "pytest", "-p", "no:cacheprovider")
    dagster = str(Path(python).parent / "dagster")
    in_project(folder, dagster, "definitions", "validate", "-w", "workspace.yaml")
    with EmbeddedAws() as aws:
        client = boto3.Session("local", "local", region_name=aws.region).client(
            "kinesis", endpoint_url=aws.endpoint_url
        )
        client.create_stream(StreamName="events", ShardCount=2)
        in_project(folder, python, "-c", PUT, **aws.environment())
        cli = (python, "-m", "kcl_pipeline.cli")
        pipeline = ("-p", "assets.my_events:my_events")
        worker = [*cli, "worker", *pipeline, "--drain", "--json"]
        shown = in_project(folder, *worker, **aws.environment()).splitlines()
        found = json.loads(shown[-1])
        assert (found["reason"], found["records"], found["rows_written"]) == ("drained", 100, 99)
        assert found["dead_letters"] == 1
        letters = [*cli, "dead-letters", *pipeline, "--json"]
        assert json.loads(in_project(folder, *letters, **aws.environment()))["total"] == 1
    assert len(shown) == 1
