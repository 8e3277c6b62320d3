"""The Dagster project at the top of the repository: what `dagster dev` shows."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from kcl_pipeline.cli.init import project_files
from kcl_pipeline.testing import run_transform
from tests.support.project_definitions import project_definitions

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "definitions.py",
    *(path for name in ("assets", "resources", "sensors") for path in (ROOT / name).glob("*.py")),
]
PARTS = {"assets", "resources", "sensors", "definitions.py", "workspace.yaml", "dagster.yaml"}


def look(folder: Path, java_home: Path) -> dict[str, Any]:
    """What the definitions have, as Dagster loads them with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("LAKE", str(folder / "lake"))
        patch.setenv("JAVA_HOME", str(java_home))
        with project_definitions(ROOT) as defs:
            dg.Definitions.validate_loadable(defs)
            graph = defs.resolve_asset_graph()
            return {
                "parents": {
                    key.to_user_string(): sorted(
                        one.to_user_string() for one in graph.get(key).parent_keys
                    )
                    for key in graph.get_all_asset_keys()
                },
                "sensors": {one.name: one.default_status.value for one in defs.sensors},
                "schedules": {one.name: one.default_status.value for one in defs.schedules},
                "resources": sorted(defs.resources),
            }


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the definitions have with and without Java."""
    folder = tmp_path_factory.mktemp("project")
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.touch(0o755)
    homes = {"with Java": folder, "without": folder / "nothing"}
    found = {name: look(folder, home) for name, home in homes.items()}
    assert not (folder / "lake").exists()
    return found


def test_the_project_has_two_pipelines_and_a_table_that_follows_one(looks):
    found = looks["with Java"]
    assert found["parents"] == {
        "kinesis/orders": [],
        "kinesis/telemetry": [],
        "orders/orders": ["kinesis/orders"],
        "orders/fleet": [],
        "orders/revenue_per_minute": ["orders/orders"],
        "telemetry/telemetry": ["kinesis/telemetry"],
        "telemetry/fleet": [],
    }
    sensors = {"orders_leader": "RUNNING", "telemetry_leader": "RUNNING", "automation": "RUNNING"}
    assert found["sensors"] == sensors
    assert found["schedules"] == {
        "orders_compact_every_night": "STOPPED",
        "orders_vacuum_every_night": "STOPPED",
    }
    tables = {"lease_table", "worker_metrics_table", "coordinator_state_table"}
    assert tables <= {*found["resources"]}


def test_the_workspace_loads_these_definitions():
    (entry,) = yaml.safe_load((ROOT / "workspace.yaml").read_text(encoding="utf-8"))["load_from"]
    module = {"module_name": "definitions", "working_directory": ".", "location_name": "orders"}
    assert entry == {"python_module": module}


def test_without_java_the_spark_pipeline_is_one_asset_that_says_so(looks):
    found = looks["without"]
    of_telemetry = [key for key in found["parents"] if key.startswith(("telemetry", "kinesis/t"))]
    assert of_telemetry == ["telemetry/needs_java"]
    assert "orders/orders" in found["parents"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_project_uses_the_public_names_only(path):
    imported = {
        node.module or ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    }
    assert {name for name in imported if name.startswith("kcl_pipeline")} <= {"kcl_pipeline"}


def test_init_writes_this_project():
    """With the names of the repository, its files are those of the repository."""
    texts = project_files("orders", "orders")
    mine = {
        "tests/test_orders.py": "tests/project/test_orders.py",
        **{path: path for path in texts if path.partition("/")[0] in PARTS},
    }
    assert {path.relative_to(ROOT).as_posix() for path in FILES} < {*mine.values()}
    for path, original in mine.items():
        assert texts[path] == (ROOT / original).read_text(encoding="utf-8"), path


@pytest.mark.spark
def test_a_reading_that_is_not_one_object_is_a_dead_letter(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")  # no embedded AWS
    from assets.telemetry import telemetry  # noqa: PLC0415 (after the variable is set)

    reading = {"id": "a", "metric": "load_1m", "value": 1.5, "time": "2026-01-02T03:04:05Z"}
    payloads = [reading, b"not JSON", b'{"metric": "a"} {"metric": "b"}', {"value": 1.5}]
    result = run_transform(telemetry, payloads)
    assert [row["metric"] for row in result.rows] == ["load_1m"]
    assert sorted(result.errors) == [1, 2, 3]
