"""The component with `dg`: check, scaffold and list."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kcl_pipeline.orchestration.component import (
    PipelineParams,
    PipelineScaffolder,
    ScaffoldRequest,
)
from tests.guides.snippets import snippets
from tests.orchestration.component.project import project  # noqa: F401 (fixture)

ROOT = Path(__file__).parents[3]
PAGE = "docs/component.md"
TYPE = "kcl_pipeline.KinesisPipelineComponent"

pytestmark = pytest.mark.processes


@pytest.fixture
def dg(project, tmp_path):  # noqa: F811
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    bin_folder = Path(sys.executable).parent

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [bin_folder / "dg", *arguments],
            cwd=project.folder,
            env=os.environ
            | {
                "DAGSTER_HOME": str(home),
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(project.source)]),
                "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
                "VIRTUAL_ENV": str(bin_folder.parent),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_what_scaffold_writes_loads(project):  # noqa: F811
    params = PipelineParams(stream="new-orders")
    for name, form in (("orders", "yaml"), ("clicks", "python")):
        folder = project.defs_folder / name
        folder.mkdir()
        PipelineScaffolder().scaffold(ScaffoldRequest(TYPE, folder, form, project.folder, params))
        assert "new-orders" in "".join(path.read_text() for path in folder.iterdir())
    assert project.load().resolve_sensor_def("clicks_leader")
    assert project.load().resolve_sensor_def("orders_leader")


@pytest.mark.long
def test_what_scaffold_writes_passes_the_checks(dg, project):  # noqa: F811
    dg("scaffold", "defs", TYPE, "orders", "--stream", "new-orders")
    text = (project.defs_folder / "orders" / "defs.yaml").read_text()
    assert f"type: {TYPE}\n" in text
    assert "- new-orders\n" in text
    assert "All definitions loaded successfully." in dg("check", "defs")
    dg("scaffold", "defs", TYPE, "clicks", "--format", "python")
    assert project.load().resolve_sensor_def("clicks_leader")
    assert project.load().resolve_sensor_def("orders_leader")


@pytest.mark.long  # `dg check yaml` below looks it up in the same registry
def test_the_component_is_listed(dg):
    listed = dg("list", "components", "--package", "kcl_pipeline", "--json")
    assert '.KinesisPipelineComponent", "summary": "A `KinesisPipeline` as a component' in listed


@pytest.mark.long
def test_the_example_of_the_document_passes_the_checks(dg, project):  # noqa: F811
    found = snippets(PAGE)
    example = next(one.code for one in found if one.language == "yaml")
    (function,) = (one.code for one in found if one.file == "transforms.py")
    (project.root / "transforms.py").write_text(function)
    project.write("orders", example.replace("my_project", project.package))
    assert "All definitions loaded successfully." in dg("check", "defs")


@pytest.mark.long  # the schema, which refuses it, is looked at in `test_schema`
def test_check_yaml_names_the_line_of_an_unknown_setting(dg, project):  # noqa: F811
    path = project.write(
        "orders",
        f"type: {TYPE}\nattributes:\n  name: orders\n  streams: [orders]\n"
        "  settings_overrides: {lease: {failover_milis: 1}}\n",
    )
    lines = len(path.read_text().splitlines())
    said = dg("check", "yaml", code=1)
    assert f"defs.yaml:{lines}" in said
    assert "'failover_milis' was unexpected" in said
