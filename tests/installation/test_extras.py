"""A feature without its extra is one sentence that names the extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from kcl_pipeline import extras
from kcl_pipeline.cli import app
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.__main__ import main as run_local
from kcl_pipeline.metrics.exporters.otel import OtelExporter
from kcl_pipeline.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def without(monkeypatch):
    def hide(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.mark.parametrize("module", extras.MODULES["local"])
def test_the_embedded_aws_names_its_extra(without, module):
    without(module)
    with pytest.raises(SettingsError) as raised:
        EmbeddedAws()
    assert str(raised.value) == (
        f"the embedded AWS needs an extra (missing: {module}): pip install 'kcl-pipeline[local]'"
    )


def test_open_telemetry_names_its_extra(without):
    without("opentelemetry", "opentelemetry.metrics")
    with pytest.raises(SettingsError) as raised:
        OtelExporter()
    assert str(raised.value) == (
        "metrics.metrics_backends with 'otel' needs an extra (missing: opentelemetry.metrics): "
        "pip install 'kcl-pipeline[otel]', or remove 'otel' from the setting"
    )


def test_fan_out_over_http2_names_its_extra(without, monkeypatch):
    without("h2")
    monkeypatch.delitem(sys.modules, "kcl_pipeline.kinesis.fan_out.http2", raising=False)
    with pytest.raises(SettingsError) as raised:
        __import__("kcl_pipeline.kinesis.fan_out.http2")
    assert str(raised.value) == (
        "retrieval.fan_out_http='2' needs an extra (missing: h2): "
        "pip install 'kcl-pipeline[http2]', or write '1.1'"
    )


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["local", "--port", "0"], "moto", "local"),
        (["run"], "flask", "local"),
        (["dev"], "dagster_webserver", "webserver"),
    ],
)
def test_a_command_names_its_extra_and_exits_with_one(without, arguments, module, extra):
    without(module)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert re.fullmatch(
        rf"Error: .* needs an extra \(missing: {module}\): pip install 'kcl-pipeline\[{extra}\]'\n",
        result.stderr,
    )


def test_the_module_of_the_embedded_aws_names_its_extra(without, capsys):
    without("moto")
    assert run_local(["--port", "0"]) == 1
    assert capsys.readouterr().err == (
        "the embedded AWS needs an extra (missing: moto): pip install 'kcl-pipeline[local]'\n"
    )


@pytest.mark.parametrize("extra", extras.MODULES)
def test_every_module_of_an_extra_comes_from_a_requirement_of_it(extra):
    requirements = {
        canonicalize_name(Requirement(text).name)
        for text in PROJECT["optional-dependencies"][extra]
    }
    found = set()
    for name in requirements:
        files = [str(file) for file in distribution(name).files or ()]
        found |= {
            module
            for module in extras.MODULES[extra]
            if any(file.startswith(module.replace(".", "/")) for file in files)
        }
    assert found == set(extras.MODULES[extra])


def test_the_core_requires_none_of_the_packages_of_the_extras():
    core = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    for extra in extras.MODULES:
        for text in PROJECT["optional-dependencies"][extra]:
            assert canonicalize_name(Requirement(text).name) not in core


def test_the_version_has_one_source():
    assert "version" in PROJECT["dynamic"]
    assert CliRunner().invoke(app, ["--version"]).stdout == f"kcl-pipeline {__version__}\n"


def test_the_shell_completes_commands():
    result = subprocess.run(
        [sys.executable, "-c", "from kcl_pipeline.cli import app; app(prog_name='kcl-pipeline')"],
        env={
            "_KCL_PIPELINE_COMPLETE": "complete_bash",
            "COMP_WORDS": "kcl-pipeline wor",
            "COMP_CWORD": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["worker"]
